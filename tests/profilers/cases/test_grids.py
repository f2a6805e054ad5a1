"""The grids and the work of the cases."""

import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeplan.planner.demo.model import ModelConfig
from moeplan.profilers.cases import CASES, PLANNED
from moeplan.profilers.cases.case import Grid, buffer_sizes
from moeplan.profilers.cases.exchange import UnevenAllToAll, splits_PP
from moeplan.profilers.measurement import Size
from moeplan.profilers.world import World

KEYS = {
    "gemm": ("m", "n", "k"),
    "expert_ffn": ("tokens", "experts", "hidden", "ffn", "grouped"),
    "routed_block": ("tokens", "experts", "hidden", "ffn"),
    "attention": ("batch", "length", "hidden", "calls"),
    "attended": ("batch", "length", "hidden", "calls"),
    "router": ("tokens", "hidden", "experts", "top_k"),
    "permutation": ("tokens", "hidden"),
    "fp8_rows": ("rows", "hidden"),
    "all_to_all": ("bytes",),
    "uneven_all_to_all": ("bytes", "sigma_percent"),
    "routed_exchange": ("bytes", "moves", "kept", "even"),
    "all_gather": ("bytes",),
    "all_reduce": ("bytes",),
    "reduce_scatter": ("bytes",),
    "point_to_point": ("bytes", "first", "second"),
}
GIB = 2**30


def grid(name: str, *, quick: bool, num_ranks: int = 4, device: str = "cpu", rank: int = 0) -> list[Size]:
    return list(CASES[name].sizes(World(rank, num_ranks, device, ("host",) * num_ranks, print), quick=quick))


def axis(sizes: list[Size], key: str) -> list[int]:
    return sorted({size[key] for size in sizes})


def test_the_registry_names_each_case_by_itself_in_order() -> None:
    assert list(CASES) == list(KEYS)
    assert all(case.name == name for name, case in CASES.items())


def test_the_registry_does_not_import_torch() -> None:
    program = "import sys, moeplan.profilers.cases; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize(("device", "num_ranks"), [("cpu", 2), ("cpu", 3), ("cpu", 64), ("cuda:0", 8), ("cuda:0", 512)])
@pytest.mark.parametrize("quick", [True, False])
def test_a_grid_is_the_same_on_all_ranks_and_ascends(name: str, device: str, num_ranks: int, quick: bool) -> None:
    sizes = grid(name, quick=quick, device=device, num_ranks=num_ranks)
    assert sizes == grid(name, quick=quick, device=device, num_ranks=num_ranks, rank=num_ranks - 1)
    assert len({tuple(sorted(size.items())) for size in sizes}) == len(sizes)
    assert {frozenset(size) for size in sizes} == {frozenset(KEYS[name])}
    work = [CASES[name].work(size, num_ranks) for size in sizes]
    assert work[0] >= 1
    assert name == "uneven_all_to_all" or work == sorted(work)


@pytest.mark.parametrize(
    "name", ["gemm", "expert_ffn", "routed_block", "attention", "attended", "router", "permutation", "fp8_rows"]
)
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("quick", [True, False])
def test_every_two_axes_vary_independently(name: str, device: str, quick: bool) -> None:
    sizes = grid(name, quick=quick, device=device)
    for one, two in combinations(KEYS[name], 2):
        if (one, two) == ("batch", "calls"):  # no more calls than sequences
            continue
        met = {(size[one], size[two]) for size in sizes}
        low = product(axis(sizes, one)[:2], axis(sizes, two)[:2])
        assert met >= set(low), f"{one} and {two} of {name}"


def test_quick_grids_are_small_and_hold_small_models_and_the_demo_inside() -> None:
    assert sum(len(grid(case.name, quick=True)) for case in PLANNED) <= 85
    demo = ModelConfig()
    local = demo.num_experts // 4
    inside: dict[str, dict[str, tuple[int, ...]]] = {
        "gemm": {"n": (64, 1024), "k": (64, 1024), "m": (16, 1024)},
        "expert_ffn": {"hidden": (64, demo.hidden_size, 1024), "ffn": (demo.ffn_size,), "experts": (local,)},
        "routed_block": {"hidden": (demo.hidden_size, 1024), "ffn": (demo.ffn_size * 2 // 3,), "experts": (local,)},
        "attention": {"hidden": (64, demo.hidden_size, 1024), "length": (demo.max_positions,), "batch": (1, 4)},
        "attended": {"hidden": (64, demo.hidden_size, 1024), "length": (demo.max_positions,), "batch": (1, 4)},
        "router": {"hidden": (64, demo.hidden_size, 1024), "experts": (demo.num_experts,), "top_k": (demo.top_k,)},
        "permutation": {"hidden": (64, demo.hidden_size, 1024)},
        "fp8_rows": {"hidden": (64, demo.hidden_size, 1024)},
    }
    for name, axes in inside.items():
        sizes = grid(name, quick=True)
        for key, values in axes.items():
            assert min(axis(sizes, key)) <= min(values) <= max(values) <= max(axis(sizes, key)), f"{key} of {name}"


@pytest.mark.parametrize(("device", "gib"), [("cpu", 0.5), ("cuda:0", 12)])
def test_no_size_needs_more_memory_than_a_rank_has(device: str, gib: float) -> None:
    elements: dict[str, Callable[[Size], int]] = {
        "gemm": lambda s: s["m"] * s["k"] + s["k"] * s["n"] + s["m"] * s["n"],
        "expert_ffn": lambda s: 3 * s["experts"] * s["hidden"] * s["ffn"] + s["tokens"] * (3 * s["ffn"] + s["hidden"]),
        "routed_block": lambda s: (
            3 * s["experts"] * s["hidden"] * s["ffn"] + s["tokens"] * (6 * s["hidden"] + 4 * s["ffn"])
        ),
        "attention": lambda s: 4 * s["hidden"] ** 2 + 6 * s["batch"] * s["length"] * s["hidden"],
        "attended": lambda s: 4 * s["hidden"] ** 2 + 20 * s["batch"] * s["length"] * s["hidden"] + 2 * s["length"] ** 2,
        "router": lambda s: s["tokens"] * (s["hidden"] + 2 * s["experts"]),
        "permutation": lambda s: 3 * s["tokens"] * s["hidden"],
        "fp8_rows": lambda s: 4 * s["rows"] * s["hidden"],
    }
    for name, count in elements.items():
        assert max(4 * count(size) for size in grid(name, quick=False, device=device)) <= gib * GIB, name
    for num_ranks in (2, 7, 512):
        world = World(0, num_ranks, device, ("host",) * num_ranks, print)
        assert 2 * max(buffer_sizes(world, quick=False)) <= gib * GIB


@given(num_ranks=st.integers(1, 5000), quick=st.booleans())
def test_buffers_are_whole_blocks_of_every_dtype(num_ranks: int, quick: bool) -> None:
    sizes = buffer_sizes(World(0, num_ranks, "cpu", ("host",) * num_ranks, print), quick=quick)
    assert sizes == sorted(set(sizes))
    assert all(size > 0 and size % (16 * num_ranks) == 0 for size in sizes)


def test_a_halved_grid_keeps_whole_curves_and_all_pairs_of_values() -> None:
    axes = {"m": (1, 2, 3), "a": (1, 2), "b": (1, 2, 3), "c": (1, 2)}
    sizes = Grid(axes, most=10**6).sizes(lambda size, _: size["m"], halved=True)
    assert len(sizes) == 3 * 6
    for one, two in combinations(axes, 2):
        assert {(size[one], size[two]) for size in sizes} == set(product(axes[one], axes[two]))
    sites = [(size["a"], size["b"], size["c"]) for size in sizes]
    assert all(sites.count(site) == 3 for site in sites)
    assert Grid({"m": (1, 2, 3)}, most=2).sizes(lambda size, _: size["m"]) == [{"m": 1}, {"m": 2}]


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("num_ranks", [2, 5])
def test_work_of_arrays_is_that_of_each_size(name: str, num_ranks: int) -> None:
    sizes = grid(name, quick=True)
    arrays = {key: np.array([size[key] for size in sizes]) for key in KEYS[name]}
    one_by_one = [CASES[name].work(size, num_ranks) for size in sizes]
    assert {type(work) for work in one_by_one} == {int}
    np.testing.assert_array_equal(CASES[name].work(arrays, num_ranks), one_by_one)  # type: ignore[arg-type]


@given(num_ranks=st.integers(2, 9), count=st.integers(100, 10**6))
def test_work_of_a_collective_is_what_the_busiest_port_passes(num_ranks: int, count: int) -> None:
    count -= count % num_ranks
    block, others = count // num_ranks, num_ranks - 1
    size = {"bytes": count}
    for name in ("all_to_all", "all_gather", "reduce_scatter"):
        assert CASES[name].work(size, num_ranks) == sum(block for _ in range(others))
    assert CASES["all_reduce"].work(size, num_ranks) == sum(2 * block for _ in range(others))
    assert CASES["point_to_point"].work(size | {"first": 0, "second": 1}, 2) == count


@given(num_ranks=st.integers(2, 9), count=st.integers(100, 10**7), sigma=st.integers(0, 300))
def test_work_of_uneven_blocks_is_that_of_the_busiest_port_in_or_out(num_ranks: int, count: int, sigma: int) -> None:
    size = {"bytes": count, "sigma_percent": sigma}
    splits = splits_PP(size, num_ranks)
    out = [sum(int(splits[rank, peer]) for peer in range(num_ranks) if peer != rank) for rank in range(num_ranks)]
    into = [sum(int(splits[peer, rank]) for peer in range(num_ranks) if peer != rank) for rank in range(num_ranks)]
    assert UnevenAllToAll().work(size, num_ranks) == max(out + into)
    assert 0 <= num_ranks * count - splits.sum() <= num_ranks**2
    assert splits.min() >= 0


def test_work_of_many_uneven_exchanges_is_counted_without_all_their_blocks() -> None:
    sizes = {"bytes": np.arange(1000, 21_000), "sigma_percent": np.array(70)}
    tracemalloc.start()
    work = UnevenAllToAll().work(sizes, 32)  # type: ignore[arg-type]
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 20_000 * 32 * 32 * 8 / 4
    assert work[77] == UnevenAllToAll().work({"bytes": 1077, "sigma_percent": 70}, 32)  # type: ignore[index]


def test_uneven_blocks_are_log_normal_and_seeded() -> None:
    size = {"bytes": 10**9, "sigma_percent": 70}
    splits = splits_PP(size, 64)
    assert np.array_equal(splits, splits_PP(size, 64))
    logs = np.log(splits)
    assert logs.std() == pytest.approx(0.7, rel=0.05)
    centred = (logs - logs.mean()) / logs.std()
    assert abs((centred**3).mean()) < 0.15
    assert (centred**4).mean() == pytest.approx(3, abs=0.3)
    assert np.ptp(splits_PP(size | {"sigma_percent": 0}, 64)) == 0
