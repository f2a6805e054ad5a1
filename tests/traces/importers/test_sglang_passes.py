"""SGLang's records by forward pass, counts and tokens: folded to logical experts as a loop over cells does it.

Legend: H hidden layers; L MoE layers; E experts; P physical experts; R ranks; B passes; T tokens; K experts a token.
"""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.errors import InputError, MismatchError
from moeplan.traces.count_form import read_counts
from moeplan.traces.importers import import_trace
from moeplan.traces.reader import open_trace
from moeplan.traces.schema import PHASES
from tests.traces.importers.recordings import (
    Files,
    assert_refused,
    config,
    counts_of,
    distinct_ids,
    per_pass,
    per_token,
    physical_map,
    tokens_of,
    write,
)

H, E, REDUNDANT, K = 4, 6, 2, 2


def folded(counts_HP: Any, map_HP: Any, num_experts: int) -> Any:
    """Logical counts `[H, E]`, cell by cell."""
    counts_HE = np.zeros((len(map_HP), num_experts), np.int64)
    for layer in range(len(map_HP)):
        for slot, expert in enumerate(map_HP[layer]):
            counts_HE[layer, expert] += counts_HP[layer, slot]
    return counts_HE


def counted(ranks: int, passes: int, map_HP: Any, dense: int = 1, seed: int = 0) -> Any:
    counts_RBHP = np.random.default_rng(seed).integers(1, 99, (ranks, passes, *map_HP.shape))
    counts_RBHP[:, :, :dense] = 0
    return counts_RBHP


def chosen(ranks: int, passes: int, tokens: int, map_HP: Any, top_k: int, dense: int, seed: int = 0) -> Any:
    """Physical ids `[R, B, H, T, K]`, -1 in dense layers; of different slots, and none all of slot 0."""
    rng = np.random.default_rng(seed)
    ids = distinct_ids(rng, (ranks, passes, len(map_HP), tokens), map_HP.shape[1], top_k)
    ids[:, :, :dense] = -1
    return ids


def test_counts_of_real_size_are_added_up_over_ranks_and_folded_through_the_map(tmp_path: Path) -> None:
    map_HP = physical_map(np.random.default_rng(1), 61, 256, 32)
    counts_RBHP = counted(3, 4, map_HP, dense=3)
    folder = write(tmp_path / "in", per_pass(counts_RBHP, map_HP))
    write(tmp_path, {"config.json": config(61, 3, 256, 8)})
    summary = import_trace(folder, tmp_path / "trace", hf_config=tmp_path / "config.json")
    found = counts_of(tmp_path / "trace")
    assert list(found) == [7, 8, 9, 10]
    for step, counts_LE in enumerate(found.values()):
        np.testing.assert_array_equal(counts_LE, folded(counts_RBHP[:, step].sum(axis=0), map_HP, 256)[3:])
    assert read_counts(tmp_path / "trace").meta.step_order == "known"
    assert (summary.model.num_experts, summary.model.layer_ids) == (256, tuple(range(3, 61)))
    assert any("wrong where EPLB moved experts" in note for note in summary.notes)
    assert any("ranks 0-2 added up" in note for note in summary.notes)


def test_tokens_of_real_size_come_back_as_logical_experts(tmp_path: Path) -> None:
    map_HP = physical_map(np.random.default_rng(1), 61, 256, 32)
    ids_RBHTK = chosen(2, 2, 40, map_HP, 8, dense=3)
    folder = write(tmp_path / "in", per_token(ids_RBHTK, map_HP))
    write(tmp_path, {"config.json": config(61, 3, 256, 8)})
    summary = import_trace(folder, tmp_path / "trace", hf_config=tmp_path / "config.json")
    batch, row = tokens_of(tmp_path / "trace"), 0
    for step in range(2):
        for rank in range(2):
            for token in range(40):
                expected = [map_HP[layer, ids_RBHTK[rank, step, layer, token]].tolist() for layer in range(3, 61)]
                assert batch.ids[row].tolist() == expected
                assert batch.step is not None
                assert batch.source_rank is not None
                told = (batch.step[row], batch.source_rank[row], batch.position[row], PHASES[batch.phase[row]])
                assert told == (7 + step, rank, step + token, "prefill")
                row += 1
    assert (len(batch), batch.sample, summary.num_tokens) == (row, None, row)
    assert any("samples are unknown" in note for note in summary.notes)
    assert any("no gate weights" in note for note in summary.notes)


@settings(deadline=None, max_examples=15)
@given(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.integers(0, 3), st.integers(0, 99)
)
def test_any_records_come_back_as_counts_and_as_tokens_alike(
    tmp_path_factory: pytest.TempPathFactory, ranks: int, passes: int, hidden: int, top_k: int, more: int, seed: int
) -> None:
    """Physical counts of the tokens, as counts, are what the tokens count."""
    folder = tmp_path_factory.mktemp("import")
    map_HP = physical_map(np.random.default_rng(seed), hidden, E, more)
    ids = chosen(ranks, passes, 3, map_HP, top_k, dense=0, seed=seed)
    ids[:, :, :, 0] = np.arange(1, top_k + 1)  # no layer is all zeros
    ids[:, 0, 0, 0, 0] = 1 + np.arange(ranks)  # no rank recorded another's tokens
    counts = np.stack([(ids == slot).sum(axis=(3, 4)) for slot in range(map_HP.shape[1])], axis=-1)
    import_trace(write(folder / "t", per_token(ids, map_HP)), folder / "tokens")
    import_trace(write(folder / "c", per_pass(counts, map_HP)), folder / "counts")
    batch = tokens_of(folder / "tokens")
    assert open_trace(folder / "tokens").model.top_k == top_k
    for step, counts_LE in counts_of(folder / "counts").items():
        assert batch.step is not None
        ids_TLK = batch.ids[batch.step == step]
        expected = [np.bincount(ids_TLK[:, layer].ravel(), minlength=E).tolist() for layer in range(hidden)]
        assert counts_LE.tolist() == expected


def test_ranks_that_share_their_tokens_are_counted_once(tmp_path: Path) -> None:
    map_HP = physical_map(np.random.default_rng(1), H, E, REDUNDANT)
    ids = chosen(2, 3, 5, map_HP, K, dense=0)[[0, 0, 1, 1]]
    summary = import_trace(write(tmp_path / "in", per_token(ids, map_HP)), tmp_path / "trace")
    assert summary.num_tokens == 2 * 3 * 5
    assert set(tokens_of(tmp_path / "trace").source_rank.tolist()) == {0, 2}  # type: ignore[union-attr]
    assert any("ranks 1, 3 recorded the very tokens of others" in note for note in summary.notes)


def test_passes_that_not_all_ranks_recorded_are_left_out_of_sums(tmp_path: Path) -> None:
    map_HP = physical_map(np.random.default_rng(1), H, E, REDUNDANT)
    files = per_pass(counted(2, 3, map_HP), map_HP)
    del files["expert_distribution_recorder_1763.25_1.pt"]["records"][0]
    summary = import_trace(write(tmp_path / "in", files), tmp_path / "trace")
    assert list(counts_of(tmp_path / "trace")) == [8, 9]
    assert any("1 passes left out" in note for note in summary.notes)


@pytest.mark.parametrize(("mode", "phase"), [(1, "prefill"), (2, "decode"), (3, "train"), (None, "train")])
def test_the_phase_follows_from_the_forward_mode_where_it_has_one(tmp_path: Path, mode: Any, phase: str) -> None:
    map_HP = physical_map(np.random.default_rng(1), H, E, REDUNDANT)
    files = per_token(chosen(1, 1, 4, map_HP, K, dense=0), map_HP, mode=mode)
    summary = import_trace(write(tmp_path / "in", files), tmp_path / "trace", phase="train")
    assert {PHASES[code] for code in tokens_of(tmp_path / "trace").phase} == {phase}
    assert any("4 tokens of passes neither prefill nor decode" in note for note in summary.notes) == (phase == "train")


def test_dense_layers_of_tokens_need_the_config(tmp_path: Path) -> None:
    map_HP = physical_map(np.random.default_rng(1), H, E, REDUNDANT)
    folder = write(tmp_path / "in", per_token(chosen(1, 2, 4, map_HP, K, dense=1), map_HP))
    with pytest.raises(InputError, match=r"hidden layers 0 are all zeros, .*; give --hf-config config\.json"):
        import_trace(folder, tmp_path / "trace")
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("top_k", [1, 9])
def test_a_config_of_another_width_is_refused(tmp_path: Path, top_k: int) -> None:
    map_HP = physical_map(np.random.default_rng(1), H, 12, REDUNDANT)
    folder = write(tmp_path / "in", per_token(chosen(1, 2, 4, map_HP, K, dense=1), map_HP))
    write(tmp_path, {"config.json": config(H, 1, 12, top_k)})
    with pytest.raises(MismatchError, match=f"2 experts a token in 8 columns; config.json says {top_k}"):
        import_trace(folder, tmp_path / "trace", hf_config=tmp_path / "config.json")


MAP = physical_map(np.random.default_rng(1), H, E, REDUNDANT)
FIRST, SECOND = (f"expert_distribution_recorder_1763.25_{rank}.pt" for rank in (0, 1))
Edit = Callable[[Files], Any]


def put(place: int, **changes: Any) -> Edit:
    """Change a record of the first rank; None takes a key away."""

    def edit(files: Files) -> None:
        record = files[FIRST]["records"][place] | changes
        files[FIRST]["records"][place] = {key: value for key, value in record.items() if value is not None}

    return edit


def doubled(times: int) -> list[Any]:
    """A list that is short in a file and, told apart, longer than any memory."""
    value: list[Any] = []
    for _ in range(times):
        value = [value, value]
    return value


def remap(change: Any) -> Edit:
    """Change the maps of both ranks."""

    def edit(files: Files) -> None:
        for file in files.values():
            file["last_physical_to_logical_map"] = change(file["last_physical_to_logical_map"])

    return edit


def with_slot(value: int) -> Edit:
    def change(found: torch.Tensor) -> torch.Tensor:
        changed = found.clone()
        changed[1, 2] = value
        return changed

    return remap(change)


IN_BOTH: dict[str, tuple[Edit, str]] = {
    "no map": (lambda files: files[FIRST].pop("last_physical_to_logical_map"), "last_physical_to_logical_map is None"),
    "a map of floats": (remap(lambda found: found.float()), "last_physical_to_logical_map is torch.float32"),
    "a map of one layer": (remap(lambda found: found[0]), "of 2 dimensions"),
    "an empty map": (remap(lambda found: found[:, :0]), "last_physical_to_logical_map of shape (4, 0)"),
    "an absurd map": (remap(lambda found: found[:1].repeat(5000, 1)), "of shape (5000, 8)"),
    "an expert past the slots": (with_slot(2**40), "lacks an expert in some layer"),
    "an expert below 0": (with_slot(-1), "lacks an expert in some layer"),
    "an expert in no slot": (remap(lambda found: found + (found == 3).int()), "lacks an expert in some layer"),
    "maps that differ": (
        lambda files: files[SECOND].update(last_physical_to_logical_map=torch.from_numpy(MAP[:, ::-1].copy())),
        "dumps of different maps",
    ),
    "records that are none": (lambda files: files[FIRST].update(records=[1, 2]), "records is no list of records"),
    "records as one": (lambda files: files[FIRST].update(records={}), "records is no list of records"),
    "no records": (lambda files: [file.update(records=[]) for file in files.values()], "no records"),
    "no pass": (put(0, forward_pass_id=None), "record 0: forward_pass_id of type NoneType"),
    "a pass below 0": (put(0, forward_pass_id=-1), "record 0: forward_pass_id of type int; expected 0 to"),
    "a pass past 32 bits": (put(0, forward_pass_id=2**31), "record 0: forward_pass_id of type int; expected 0 to"),
    "a pass in words": (put(0, forward_pass_id="7"), "record 0: forward_pass_id of type str"),
    "a pass of 5,000 digits": (put(0, forward_pass_id=10**5000), "tensors and plain values (LONG4)"),
    "a pass that has no end": (put(0, forward_pass_id=doubled(60)), "refers to a tuple, list or object a second time"),
    "no rank": (put(1, rank=None), "record 1: rank of type NoneType"),
    "a truth for a rank": (put(1, rank=True), "record 1: rank of type bool"),
    "a rank of another file": (put(1, rank=1), "pass 8 of rank 1 for the second time: counted double"),
    "a pass twice": (
        lambda files: files[FIRST]["records"].append(deepcopy(files[FIRST]["records"][0])),
        "pass 7 of rank 0 for",
    ),
    "half a pass": (put(0, gatherer_key="child_a"), "record 0: gatherer_key is not primary"),
    "a rank missing": (lambda files: files.pop(FIRST), "ranks 1 and not 0; expected the files of all ranks"),
    "two modes": (put(0, topk_ids_of_layer=torch.zeros(1), global_physical_count=torch.zeros(1)), ""),
}


def part(name: str, change: Callable[[torch.Tensor], Any]) -> Edit:
    """Change a tensor of the first rank's first record."""

    def edit(files: Files) -> None:
        record = files[FIRST]["records"][0]
        record[name] = change(record[name])

    return edit


def only(name: str, change: Callable[[torch.Tensor], Any]) -> Edit:
    """Change a tensor of all records."""

    def edit(files: Files) -> None:
        for file in files.values():
            for record in file["records"]:
                record[name] = change(record[name])

    return edit


COUNT, IDS = "global_physical_count", "topk_ids_of_layer"
OF_COUNTS: dict[str, tuple[Edit, str]] = {
    "no counts": (put(0, global_physical_count=None), "global_physical_count is NoneType"),
    "counts as a list": (part(COUNT, lambda found: found.tolist()), "global_physical_count is list"),
    "counts of another width": (part(COUNT, lambda found: found[:, :7]), "of shape (4, 7); the map has (4, 8)"),
    "counts of fewer layers": (part(COUNT, lambda found: found[:3]), "of shape (3, 8); the map has (4, 8)"),
    "counts past all sums": (part(COUNT, lambda found: found.long() + 2**62), ": count 46116860184"),
    "negative counts": (part(COUNT, lambda found: -found), "global_physical_count: count -"),
    "floats": (part(COUNT, lambda found: found.float()), "is torch.float32 (4, 8)"),
    "bytes that repeat": (part(COUNT, lambda found: found[:1, :1].clone().expand(4, 8)), "larger than its bytes"),
    "nothing counted": (only(COUNT, lambda found: 0 * found), "nothing is counted in any layer"),
    "no common pass": (
        lambda files: [
            record.update(forward_pass_id=record["forward_pass_id"] + 9) for record in files[FIRST]["records"]
        ],
        "no passes that all 2 ranks recorded",
    ),
}
OF_TOKENS: dict[str, tuple[Edit, str]] = {
    "ids as a list": (part(IDS, lambda found: found.tolist()), "topk_ids_of_layer is list"),
    "an id past the slots": (part(IDS, lambda found: found.clamp(max=0) + 8), "from 7 to 8; the map has slots 0 to 7"),
    "an id below -1": (part(IDS, lambda found: found - 2), "from -3 to"),
    "ids of fewer layers": (part(IDS, lambda found: found[:3]), "of shape (3, 5, 8)"),
    "ids of two dimensions": (part(IDS, lambda found: found[0]), "of 3 dimensions"),
    "another width": (part(IDS, lambda found: found[..., :7]), "2 widths of topk_ids_of_layer"),
    "no width": (only(IDS, lambda found: found[..., :0]), "of shape (4, 5, 0)"),
    "an absurd width": (only(IDS, lambda found: found.repeat(1, 1, 9)), "with 6 experts, top-66"),
    "nothing routed": (only(IDS, lambda found: 0 * found - 1), "1 widths of topk_ids_of_layer; expected tokens"),
    "no tokens": (only(IDS, lambda found: found[:, :0]), "positions of a record are not the 0 numbers"),
    "fewer positions": (put(0, positions=[1, 2]), "positions of a record are not the 5 numbers of its tokens"),
    "positions in words": (put(0, positions=["1"] * 5), "positions of a record are not"),
    "no positions": (put(0, positions=None), "positions of a record are not"),
    "negative positions": (put(0, positions=[-1, 2, 3, 4, 5]), "positions of a record are not all from 0"),
    "positions past 32 bits": (put(0, positions=[2**40] * 5), "positions of a record are not all from 0"),
    "bytes that repeat": (part(IDS, lambda found: found[:1, :1].clone().expand(4, 5, 8)), "larger than its bytes"),
}
CASES = [
    *(("counts", name, *case) for name, case in (IN_BOTH | OF_COUNTS).items()),
    *(("tokens", name, *case) for name, case in (IN_BOTH | OF_TOKENS).items()),
]


@pytest.mark.parametrize(
    ("form", "name", "edit", "expected"), CASES, ids=[f"{form}-{name}" for form, name, *_ in CASES]
)
def test_malformed_records_are_one_clear_line_and_leave_nothing(
    tmp_path: Path, form: str, name: str, edit: Edit, expected: str
) -> None:
    tokens = per_token(chosen(2, 3, 5, MAP, K, dense=0), MAP)
    files = tokens if form == "tokens" else per_pass(counted(2, 3, MAP), MAP)
    edit(files)
    folder = write(tmp_path / "in", files)
    assert_refused(folder, expected)
