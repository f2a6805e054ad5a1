"""Clusters of copies and their fold in one process: held against NumPy, against finite differences, and a bound.

Legend: T tokens; K experts per token; M hidden size; E experts; D devices; n copies.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moeplan.planner.demo.model import Experts
from moeplan.profilers.routed import partial_sums
from moeplan.runtime.engine.chunks import Chunks
from moeplan.runtime.engine.clusters import BLOCK, STRIP, clusters, nearest, priority, products, rounds, star
from moeplan.runtime.engine.condenser import Condenser, standing
from moeplan.runtime.engine.copies import Copies, select
from moeplan.runtime.engine.fold import Fold, asked

EXPERTS, DEVICES = 6, 3
STEEPEST = 1.1  # of silu


@dataclass
class Rows:
    """Tokens near some centres, their experts and gate weights, and the copies that two experts a device get."""

    x: Tensor
    ids: Tensor
    weight: Tensor
    copies: Copies

    @classmethod
    def drawn(cls, seed: int, num_tokens: int, top_k: int, *, experts: int = EXPERTS, spread: float = 0.2) -> "Rows":
        """Of a seed."""
        rng = torch.Generator().manual_seed(seed)
        centres = torch.randn(max(num_tokens // 4, 1), 8, generator=rng, dtype=torch.float64)
        x = centres[torch.randint(len(centres), (num_tokens,), generator=rng)]
        x = x + spread * torch.randn(x.shape, generator=rng, dtype=torch.float64)
        logits, ids = torch.randn(num_tokens, experts, generator=rng, dtype=torch.float64).topk(top_k)
        copies = select(ids, ids // (experts // DEVICES), None, (1, DEVICES))
        return cls(x, ids, logits.softmax(1), copies)

    def found(self, tau: float, *, cosine: bool = False) -> Tensor:
        """The copy that stands for each, where tokens are on device 0."""
        return standing(self.copies, self.x, self.weight, self.copies.place > 0, tau, cosine=cosine)


def distinct(stands: Tensor) -> Tensor:
    """What occurs, ascending."""
    return torch.unique(stands)  # type: ignore[no-any-return]


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    num_tokens=st.integers(0, 60),
    top_k=st.integers(1, 4),
    tau=st.floats(0.05, 1.5),
    cosine=st.booleans(),
)
def test_every_condensed_row_is_within_tau_of_one_that_travels_and_asks_its_device_for_the_same(
    seed: int, num_tokens: int, top_k: int, tau: float, cosine: bool
) -> None:
    rows = Rows.drawn(seed, num_tokens, top_k)
    stands = rows.found(tau, cosine=cosine).numpy()
    x, weight, ids = rows.x.numpy(), rows.weight.numpy(), rows.ids.numpy()
    token, device = rows.copies.row.numpy(), rows.copies.place.numpy()
    assert (stands[stands] == stands).all()
    assert (stands[device == 0] == np.flatnonzero(device == 0)).all()
    for one, kept in enumerate(stands):
        of = [
            {e: w for e, w in zip(ids[token[row]].tolist(), weight[token[row]], strict=True) if e // 2 == device[one]}
            for row in (one, kept)
        ]
        assert device[one] == device[kept]
        assert of[0].keys() == of[1].keys()
        u, v = (x[token[r]] / np.linalg.norm(x[token[r]]) for r in (one, kept))
        gates = [sum(weights.values()) for weights in of]
        far = np.linalg.norm(u - v) + sum(abs(of[0][e] / gates[0] - of[1][e] / gates[1]) for e in of[0]) / 2
        assert one == kept or far * (1 if cosine else gates[0]) <= tau + 1e-5


def test_rows_are_counted_in_training_alone() -> None:
    rows = Rows.drawn(0, 40, 1, experts=DEVICES, spread=0.0)
    condenser = Condenser(cosine=False, medoid=False)
    condenser.reach = 0.5
    for training in (False, True):
        condenser._stands(rows.copies, rows.x, rows.weight, 0, training=training)
        counts = condenser.rows, condenser.saved
        assert all(counts) if training else counts == (0, 0)


def test_a_row_without_a_gate_weight_stays_alone() -> None:
    rows = Rows.drawn(0, 40, 1, experts=DEVICES, spread=0.0)
    alone = torch.arange(len(rows.copies.row))
    assert (rows.found(0.5) != alone).any()
    rows.weight.zero_()
    assert (rows.found(0.5) == alone).all()


@pytest.mark.parametrize("cosine", [False, True])
def test_a_row_that_is_not_finite_serves_no_other(cosine: bool) -> None:
    rows = Rows.drawn(0, 60, 1, experts=DEVICES, spread=0.01)
    before = rows.found(0.5, cosine=cosine)
    broken = int(rows.copies.row[(before != torch.arange(len(before))).nonzero()[0, 0]])
    rows.x[broken, 0] = torch.inf
    stands = rows.found(0.5, cosine=cosine)
    of_broken = rows.copies.row == broken
    assert (rows.copies.row[stands[~of_broken]] != broken).all()
    assert (stands != torch.arange(len(stands))).any()


@pytest.mark.parametrize(("reach", "expected"), [(0.19, [0, 1]), (0.21, [0, 0])])
def test_half_the_difference_of_shares_is_as_far_as_two_equal_rows_are(reach: float, expected: list[int]) -> None:
    ids = torch.tensor([[2, 3], [2, 3]])
    copies = select(ids, ids // 2, None, (1, DEVICES))
    share_nK = torch.tensor([[0.3, 0.7], [0.5, 0.5]])
    assert clusters(copies, torch.ones(2, 8), share_nK, torch.full((2,), reach), priority).tolist() == expected


@pytest.mark.parametrize(("first", "expected"), [(0, [0, 0]), (1, [0, 1])])
def test_rows_for_more_experts_than_one_number_holds_are_told_apart_by_the_first(
    first: int, expected: list[int]
) -> None:
    ids = torch.tensor([[0, *range(10, 17), 254], [first, *range(10, 17), 254]])  # 256 ** 8 is 0 in 64 bits
    copies, share_nK = select(ids, torch.ones_like(ids), None, (1, DEVICES)), torch.full(ids.shape, 1 / 9)
    assert clusters(copies, torch.ones(2, 8), share_nK, torch.ones(2), priority).tolist() == expected


def test_large_groups_are_compared_in_blocks_of_about_equal_size() -> None:
    rows = Rows.drawn(3, 2 * BLOCK + 2, 1, experts=DEVICES, spread=0.0)
    rows.ids.fill_(1)
    rows.copies = select(rows.ids, rows.ids, None, (1, DEVICES))
    rows.x = rows.x[:1].expand(len(rows.x), -1)
    stands = rows.found(0.01)  # equal rows: one of each of three blocks stands for all of it
    assert distinct(stands).tolist() == [0, 683, 1366]
    assert [int((stands == first).sum()) for first in (0, 683, 1366)] == [683, 683, 684]


@pytest.mark.parametrize("width", [1, 2 * STRIP - 1, 2 * STRIP, 3 * STRIP + 1, BLOCK - 1, BLOCK])
def test_products_of_a_wide_block_are_those_of_all_pairs(width: int) -> None:
    rows_BwM = torch.randn(2, width, 5, generator=torch.Generator().manual_seed(width))
    expected = np.einsum("biM,bjM->bij", *[rows_BwM.double().numpy()] * 2)
    np.testing.assert_allclose(products(rows_BwM).numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_rounds_and_mixed_precision_find_the_same_clusters(top_k: int) -> None:
    rows = Rows.drawn(5, 300, top_k)
    _, weight = asked(rows.copies, rows.weight, torch.arange(len(rows.copies.row)))
    arguments = rows.copies, rows.x, weight / weight.sum(1, keepdim=True), 0.3 / weight.sum(1)
    expected = clusters(*arguments, priority)
    assert len(distinct(expected)) < 0.9 * len(expected)
    assert torch.equal(clusters(*arguments, lambda room: nearest(room, rounds(room >= 0))), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(clusters(*arguments, priority), expected)
    assert len(distinct(clusters(*arguments, star))) < 0.9 * len(expected)


@given(seed=st.integers(0, 10**6), size=st.integers(1, 12))
def test_rows_that_serve_most_are_kept_and_each_other_goes_to_the_nearest_of_them(seed: int, size: int) -> None:
    room_ww = np.random.default_rng(seed).normal(size=(size, size))
    np.fill_diagonal(room_ww, 0.0)
    serves_ww, kept = room_ww >= 0, list[int]()
    for row in sorted(range(size), key=lambda row: (-serves_ww[row].sum(), row)):
        if not any(serves_ww[one, row] for one in kept):
            kept.append(row)
    expected = [row if row in kept else max(kept, key=lambda one: room_ww[one, row]) for row in range(size)]
    room_Bww = torch.from_numpy(room_ww)[None]
    assert priority(room_Bww)[0].tolist() == expected
    assert nearest(room_Bww, rounds(room_Bww >= 0))[0].tolist() == expected


def outputs(fold: Fold, experts: Experts, num_tokens: int) -> Tensor:
    """What tokens get if all experts are here."""
    return fold.spread(partial_sums(experts, fold.x, fold.copies.beside.long(), fold.weight)[0], num_tokens)


def experts_of() -> Experts:
    torch.manual_seed(1)
    return Experts(EXPERTS, 8, 5).double()


@pytest.mark.parametrize("chunks", [Chunks.whole(), Chunks.of([0.5, 0.5], [0.3, 0.7])], ids=["whole", "pieces"])
@pytest.mark.parametrize("medoid", [False, True])
def test_gradients_of_a_fold_are_those_of_finite_differences(medoid: bool, chunks: Chunks) -> None:
    rows, experts = Rows.drawn(7, 14, 3), experts_of()
    stands = rows.found(0.4)
    assert len(distinct(stands)) < len(stands)

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return outputs(Fold.of(rows.copies, x, weight, stands, chunks, medoid=medoid), experts, len(x))

    x, weight = rows.x.clone().requires_grad_(), rows.weight.clone().requires_grad_(medoid)  # weights of means are held
    assert torch.autograd.gradcheck(run, (x, weight))
    run(x, weight).sum().backward()  # type: ignore[no-untyped-call]
    travelling = distinct(rows.copies.row[stands if medoid else torch.arange(len(stands))])
    assert (x.grad.abs().sum(1) > 0).nonzero().flatten().tolist() == travelling.tolist()  # type: ignore[union-attr]


def test_rows_that_stand_for_none_travel_as_they_are_and_pieces_are_even() -> None:
    rows = Rows.drawn(9, 200, 2)
    stands = rows.found(0.3)
    alone = stands.bincount(minlength=len(stands))[stands] == 1
    for medoid in (False, True):
        fold = Fold.of(rows.copies, rows.x, rows.weight, stands, Chunks.of([0.25] * 4, [1.0]), medoid=medoid)
        assert torch.equal(fold.x[fold.row_n[alone]], rows.x[rows.copies.row[alone]])
        assert torch.equal(fold.weight[fold.row_n[alone]], rows.weight[rows.copies.row[alone]])
        assert torch.equal(fold.copies.beside[fold.row_n[alone]], rows.copies.beside[alone])
        assert fold.scale[alone].eq(1).all()
        assert fold.copies.counts.sum() == len(stands) - fold.condensed == len(distinct(stands))
        assert (fold.copies.counts.max(0).values - fold.copies.counts.min(0).values).max() <= 1
        kept = distinct(stands)
        if medoid:
            assert torch.equal(fold.x[fold.row_n[kept]], rows.x[rows.copies.row[kept]])
            assert fold.scale[kept].eq(1).all()


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_what_a_token_loses_is_at_most_what_its_condensed_rows_may_add(top_k: int) -> None:
    rows, experts = Rows.drawn(11, 120, top_k), experts_of()
    stands, everyone = rows.found(0.5), torch.arange(len(rows.copies.row))
    assert (stands != everyone).sum() > 10
    exact, folded = (
        outputs(Fold.of(rows.copies, rows.x, rows.weight, one, Chunks.whole(), medoid=True), experts, len(rows.x))
        for one in (everyone, stands)
    )
    norms = torch.linalg.matrix_norm(experts.w_in, 2) * torch.linalg.matrix_norm(experts.w_out, 2)
    steepest_E1 = STEEPEST * norms.detach()[:, None]  # |E(x) - E(y)| <= this |x - y|, and E(0) = 0
    bound_T = torch.zeros(len(rows.x), dtype=torch.float64)
    ids_nK, weight_nK = asked(rows.copies, rows.weight, everyone)
    for one, kept in enumerate(stands.tolist()):
        gate, share = weight_nK[one].sum(), weight_nK[one] / weight_nK[one].sum()
        moved = (share - weight_nK[kept] / weight_nK[kept].sum()).abs()
        x, stood = rows.x[rows.copies.row[one]], rows.x[rows.copies.row[kept]]
        far = share * (x - stood).norm() + moved * stood.norm()
        bound_T[rows.copies.row[one]] += gate * (far * steepest_E1[ids_nK[one].long(), 0]).sum()
    error_T = (exact - folded).norm(dim=1)
    assert (error_T <= bound_T + 1e-12).all()
    assert (bound_T[error_T == 0] < 1e-12).all()
    assert error_T.max() > 0.01
