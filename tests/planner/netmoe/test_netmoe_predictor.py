"""The predictor: what it learns, that its file is exact, and that no file can hurt."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moeplan.errors import InputError
from moeplan.planner.netmoe.counted import Counted, SampleTraffic
from moeplan.planner.netmoe.predictor import Predictor, fit_predictor
from moeplan.profilers.cluster import Cluster
from moeplan.solvers import contiguous

SHAPES = st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 4))


def of_chain(samples: int, *, linked: bool, seed: int = 0) -> tuple[Counted, SampleTraffic, np.ndarray]:
    """Samples with tastes of their own whose tokens follow one chain of experts, and the chain by device."""
    rng = np.random.default_rng(seed)
    placement = contiguous.solve(2, 8, Cluster(1, 4)).placement
    traffic = SampleTraffic.empty(placement, samples, Cluster(1, 4), linked=linked)
    counted = Counted(np.zeros((samples, 2, 8), np.int32), {"plan": traffic})
    chain = rng.dirichlet(np.full(8, 0.1), 8)
    for i in range(samples):
        counted.experts[i, 0] = rng.multinomial(300, rng.dirichlet(np.full(8, 0.3)))
        onward = np.array([rng.multinomial(n, p) for n, p in zip(counted.experts[i, 0], chain, strict=True)])
        traffic.copies[i, 1] = onward.sum(axis=0).reshape(4, 2).sum(axis=1)
        if traffic.linked is not None:
            traffic.linked[0] += onward.reshape(8, 4, 2).sum(axis=2)
    return counted, traffic, chain.reshape(8, 4, 2).sum(axis=2)


@pytest.mark.parametrize("linked", [True, False])
def test_it_finds_the_chain_from_samples_and_from_linked_tokens(linked: bool) -> None:
    counted, traffic, chain = of_chain(200, linked=linked)
    found = fit_predictor(counted, traffic, np.ones(200, bool), top_k=1)
    np.testing.assert_allclose(found.per_pair[0], chain, atol=0.02 if linked else 0.05)


def test_linked_tokens_help_where_samples_are_few() -> None:
    errors = {}
    for linked in (True, False):
        counted, traffic, chain = of_chain(3, linked=linked)
        found = fit_predictor(counted, traffic, np.ones(3, bool), top_k=1)
        errors[linked] = np.abs(found.per_pair[0] - chain).mean()
    assert errors[True] < 0.5 * errors[False]


def test_samples_that_are_held_out_teach_nothing() -> None:
    counted, traffic, _ = of_chain(20, linked=False)
    fitted = np.arange(20) < 10
    one = fit_predictor(counted, traffic, fitted, top_k=1)
    counted.experts[10:] = traffic.copies[10:] = 7
    np.testing.assert_array_equal(fit_predictor(counted, traffic, fitted, top_k=1).per_pair, one.per_pair)


def test_copies_are_predicted_layer_by_layer_and_never_negative() -> None:
    predictor = Predictor(np.array([[[1.0, -2.0], [0.5, 0.0]]], np.float32))
    found = predictor.copies(0, np.array([[2, 4], [0, 1]]))
    assert found is not None
    assert found.tolist() == [[4, 0], [0.5, 0]]
    assert predictor.copies(1, np.array([[2, 4]])) is None


@settings(max_examples=30)
@given(st.data(), SHAPES)
def test_its_file_gives_it_back(data: st.DataObject, shape: tuple[int, int, int]) -> None:
    values = data.draw(hnp.arrays(np.float32, shape, elements=st.floats(-1e6, 1e6, width=32)))
    contents = Predictor(values).to_bytes()
    np.testing.assert_array_equal(Predictor.from_bytes(contents, shape).per_pair, values)
    assert contents == Predictor(values).to_bytes()


@settings(max_examples=60)
@given(st.data())
def test_a_damaged_file_is_refused_or_a_predictor_of_the_shape(data: st.DataObject) -> None:
    contents = bytearray(Predictor(np.ones((1, 2, 3), np.float32)).to_bytes())
    if data.draw(st.booleans()):
        del contents[data.draw(st.integers(0, len(contents) - 1)) :]
    else:
        contents[data.draw(st.integers(0, len(contents) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = Predictor.from_bytes(bytes(contents), (1, 2, 3))
    except InputError:
        return
    assert found.per_pair.shape == (1, 2, 3)
    assert np.isfinite(found.per_pair).all()


def test_numbers_that_are_not_finite_are_refused() -> None:
    contents = Predictor(np.full((1, 1, 2), np.nan, np.float32)).to_bytes()
    with pytest.raises(InputError, match="not finite"):
        Predictor.from_bytes(contents, (1, 1, 2))
    with pytest.raises(InputError, match="expected copies_per_pair float32"):
        Predictor.from_bytes(contents, (1, 2, 2))
