"""The predictor: what it learns."""

import numpy as np
import pytest

from moeplan.planner.evaluate.tally import SampleTraffic
from moeplan.planner.strategies.netmoe.policy import fit_predictor
from moeplan.profilers.cluster import Cluster
from moeplan.solvers import contiguous


def of_chain(samples: int, *, linked: bool, seed: int = 0) -> tuple[np.ndarray, SampleTraffic, np.ndarray]:
    """Samples with tastes of their own whose tokens follow one chain of experts, and the chain by device."""
    rng = np.random.default_rng(seed)
    placement = contiguous.solve(2, 8, Cluster(1, 4)).placement
    traffic = SampleTraffic.empty(placement, samples, Cluster(1, 4), linked=linked)
    experts = np.zeros((samples, 2, 8), np.int32)
    chain = rng.dirichlet(np.full(8, 0.1), 8)
    for i in range(samples):
        experts[i, 0] = rng.multinomial(300, rng.dirichlet(np.full(8, 0.3)))
        onward = np.array([rng.multinomial(n, p) for n, p in zip(experts[i, 0], chain, strict=True)])
        traffic.copies[i, 1] = onward.sum(axis=0).reshape(4, 2).sum(axis=1)
        if traffic.linked is not None:
            traffic.linked[0] += onward.reshape(8, 4, 2).sum(axis=2)
    return experts, traffic, chain.reshape(8, 4, 2).sum(axis=2)


@pytest.mark.parametrize("linked", [True, False])
def test_it_finds_the_chain_from_samples_and_from_linked_tokens(linked: bool) -> None:
    experts, traffic, chain = of_chain(200, linked=linked)
    found = fit_predictor(experts, traffic, np.ones(200, bool), top_k=1)
    np.testing.assert_allclose(found.per_pair[0], chain, atol=0.02 if linked else 0.05)


def test_linked_tokens_help_where_samples_are_few() -> None:
    errors = {}
    for linked in (True, False):
        experts, traffic, chain = of_chain(3, linked=linked)
        found = fit_predictor(experts, traffic, np.ones(3, bool), top_k=1)
        errors[linked] = np.abs(found.per_pair[0] - chain).mean()
    assert errors[True] < 0.5 * errors[False]


def test_samples_that_are_held_out_teach_nothing() -> None:
    experts, traffic, _ = of_chain(20, linked=False)
    fitted = np.arange(20) < 10
    one = fit_predictor(experts, traffic, fitted, top_k=1)
    experts[10:] = traffic.copies[10:] = 7
    np.testing.assert_array_equal(fit_predictor(experts, traffic, fitted, top_k=1).per_pair, one.per_pair)
