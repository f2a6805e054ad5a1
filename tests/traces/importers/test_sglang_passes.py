"""SGLang's records by forward pass, counts and tokens: folded to logical experts as a loop over cells does it.

Legend: H hidden layers; L MoE layers; E experts; P physical experts; R ranks; B passes; T tokens; K experts per token.
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

from moeplan.errors import MismatchError
from moeplan.traces.count_form import read_counts
from moeplan.traces.reader import open_trace
from moeplan.traces.schema import PHASES
from tests.traces.importers.recordings import (
    Files,
    config,
    counts_of,
    distinct_ids,
    imported,
    is_said,
    per_pass,
    per_token,
    physical_map,
    refused,
    tokens_of,
)

H, E, K = 4, 6, 2
MAP = physical_map(np.random.default_rng(1), H, E, 2)


def counted(ranks: int, passes: int, map_HP: Any = MAP, dense: int = 1, seed: int = 0) -> Any:
    counts_RBHP = np.random.default_rng(seed).integers(1, 99, (ranks, passes, *map_HP.shape))
    counts_RBHP[:, :, :dense] = 0
    return counts_RBHP


def chosen(
    ranks: int, passes: int, tokens: int, map_HP: Any = MAP, top_k: int = K, dense: int = 0, seed: int = 0
) -> Any:
    """Physical ids `[R, B, H, T, K]`, -1 in dense layers; of different slots, and none all of slot 0."""
    shape = (ranks, passes, len(map_HP), tokens)
    ids = distinct_ids(np.random.default_rng(seed), shape, map_HP.shape[1], top_k)
    ids[:, :, :dense] = -1
    return ids


@settings(max_examples=15)
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
    summary = imported(folder / "t", per_token(ids, map_HP), to="../tokens")
    assert is_said(summary, "samples are unknown")
    assert is_said(summary, "no gate weights")
    imported(folder / "c", per_pass(counts, map_HP), to="../counts")
    batch = tokens_of(folder / "tokens")
    assert open_trace(folder / "tokens").model.top_k == top_k
    logical = map_HP[np.arange(hidden)[:, None, None], ids].transpose(1, 0, 3, 2, 4)
    np.testing.assert_array_equal(batch.ids, logical.reshape(-1, hidden, top_k))
    place_T, rank_T, token_T = np.indices((passes, ranks, 3)).reshape(3, -1)
    columns = [batch.step, batch.source_rank, batch.position]
    np.testing.assert_array_equal(columns, [7 + place_T, rank_T, place_T + token_T])
    assert batch.sample is None
    for step, counts_LE in counts_of(folder / "counts").items():
        ids_TLK = batch.ids[batch.step == step]
        expected = [np.bincount(ids_TLK[:, layer].ravel(), minlength=E).tolist() for layer in range(hidden)]
        assert counts_LE.tolist() == expected


def test_ranks_that_share_their_tokens_are_counted_once(tmp_path: Path) -> None:
    ids = chosen(2, 3, 5)
    ids[..., 1] = 0  # a last choice, though always of slot 0
    summary = imported(tmp_path, per_token(ids[[0, 0, 1, 1]], MAP))
    assert (summary.num_tokens, summary.model.top_k) == (2 * 3 * 5, 2)
    assert set(tokens_of(tmp_path / "trace").source_rank.tolist()) == {0, 2}
    assert is_said(summary, "ranks 1, 3 recorded the very tokens of others")


def test_sums_are_of_the_layers_of_the_config_and_of_passes_that_all_ranks_recorded(tmp_path: Path) -> None:
    files = per_pass(counted(2, 3), MAP)
    del files[SECOND]["records"][0]
    summary = imported(tmp_path, files, config=config(H, 1, E, K))
    assert list(counts_of(tmp_path / "trace")) == [8, 9]
    assert read_counts(tmp_path / "trace").meta.step_order == "known"
    assert (summary.model.num_experts, summary.model.layer_ids) == (E, (1, 2, 3))
    for said in ("1 passes left out", "wrong where EPLB moved experts", "ranks 0-1 added up"):
        assert is_said(summary, said)


@pytest.mark.parametrize(("mode", "phase"), [(1, "prefill"), (2, "decode"), (3, "train"), (None, "train")])
def test_the_phase_follows_from_the_forward_mode_where_it_has_one(tmp_path: Path, mode: Any, phase: str) -> None:
    ids = chosen(1, 1, 4, dense=1)
    summary = imported(tmp_path, per_token(ids, MAP, mode=mode), phase="train", config=config(H, 1, E, K))
    assert (summary.model.layer_ids, summary.model.top_k) == ((1, 2, 3), 2)
    batch = tokens_of(tmp_path / "trace")
    for token, layer in np.ndindex(4, 3):
        assert batch.ids[token, layer].tolist() == MAP[layer + 1, ids[0, 0, layer + 1, token]].tolist()
    assert {PHASES[code] for code in tokens_of(tmp_path / "trace").phase} == {phase}
    assert is_said(summary, "4 tokens of passes neither prefill nor decode") == (phase == "train")


@pytest.mark.parametrize("top_k", [1, 9])
def test_a_config_of_another_width_is_refused(tmp_path: Path, top_k: int) -> None:
    map_HP = physical_map(np.random.default_rng(1), H, 12, 2)
    files = per_token(chosen(1, 2, 4, map_HP, dense=1), map_HP)
    told = f"2 experts per token in 8 columns; config.json says {top_k}"
    refused(tmp_path, files, told, kind=MismatchError, config=config(H, 1, 12, top_k))


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
    def change(slots: torch.Tensor) -> torch.Tensor:
        changed = slots.clone()
        changed[1, 2] = value
        return changed

    return remap(change)


IDS_OF_RECORDS: dict[str, tuple[int, tuple[Any, ...]]] = {  # a record, and values that its key does not hold
    "forward_pass_id": (0, (None, -1, 2**31, "7")),
    "rank": (1, (None, True)),
}
IN_BOTH: dict[str, tuple[Edit, str]] = {
    f"{key} {value}": (put(record, **{key: value}), f"record {record}: {key} of type {type(value).__name__}")
    for key, (record, values) in IDS_OF_RECORDS.items()
    for value in values
} | {
    "no map": (lambda files: files[FIRST].pop("last_physical_to_logical_map"), "last_physical_to_logical_map is None"),
    "a map of one layer": (remap(lambda found: found[0]), "of 2 dimensions"),
    "an empty map": (remap(lambda found: found[:, :0]), "last_physical_to_logical_map of shape (4, 0)"),
    "an absurd map": (remap(lambda found: found[:1].repeat(5000, 1)), "of shape (5000, 8)"),
    "a map too wide": (remap(lambda found: found[:, :1].repeat(1, 65_535)), "of shape (4, 65535)"),
    "an expert past the slots": (with_slot(2**40), "lacks an expert in some layer"),
    "an expert in no slot": (remap(lambda found: found + (found == 3).int()), "lacks an expert in some layer"),
    "maps that differ": (
        lambda files: files[SECOND].update(last_physical_to_logical_map=torch.from_numpy(MAP[:, ::-1].copy())),
        "dumps of different maps",
    ),
    "records that are none": (lambda files: files[FIRST].update(records=[1, 2]), "records is no list of records"),
    "no records": (lambda files: [file.update(records=[]) for file in files.values()], "no records"),
    "a pass of 5,000 digits": (put(0, forward_pass_id=10**5000), "tensors and plain values (LONG4)"),
    "a pass that has no end": (put(0, forward_pass_id=doubled(60)), "refers to a tuple, list or object a second time"),
    "a rank of another file": (put(1, rank=1), "pass 8 of rank 1 for the second time: counted double"),
    "a pass twice": (
        lambda files: files[FIRST]["records"].append(deepcopy(files[FIRST]["records"][0])),
        "pass 7 of rank 0 for",
    ),
    "half a pass": (put(0, gatherer_key="child_a"), "record 0: gatherer_key is not primary"),
    "a rank missing": (lambda files: files.pop(FIRST), "ranks 1 and not 0; expected the files of all ranks"),
    "two modes": (put(0, topk_ids_of_layer=torch.zeros(1), global_physical_count=torch.zeros(1)), ""),
}


def part(name: str, change: Callable[[torch.Tensor], Any], *, every: bool = False) -> Edit:
    """Change a tensor of the first rank's first record, or of all records."""

    def edit(files: Files) -> None:
        records = [record for file in files.values() for record in file["records"]]
        for record in records if every else records[:1]:
            record[name] = change(record[name])

    return edit


COUNT, IDS = "global_physical_count", "topk_ids_of_layer"
OF_COUNTS: dict[str, tuple[Edit, str]] = {
    "no counts": (put(0, global_physical_count=None), "global_physical_count is NoneType"),
    "counts of another width": (part(COUNT, lambda found: found[:, :7]), "of shape (4, 7); the map has (4, 8)"),
    "counts of fewer layers": (part(COUNT, lambda found: found[:3]), "of shape (3, 8); the map has (4, 8)"),
    "counts past all sums": (part(COUNT, lambda found: found.long() + 2**62), ": count 46116860184"),
    "negative counts": (part(COUNT, lambda found: -found), "global_physical_count: count -"),
    "nothing counted": (part(COUNT, lambda found: 0 * found, every=True), "nothing is counted in any layer"),
    "no common pass": (
        lambda files: [
            record.update(forward_pass_id=record["forward_pass_id"] + 9) for record in files[FIRST]["records"]
        ],
        "no passes that all 2 ranks recorded",
    ),
}
POSITIONS: dict[str, tuple[Any, ...]] = {
    "not the 5 numbers of its tokens": ([1, 2], ["1"] * 5, None),
    "not all from 0": ([-1, 2, 3, 4, 5], [2**40] * 5),
}
OF_TOKENS: dict[str, tuple[Edit, str]] = {
    f"positions {value}": (put(0, positions=value), f"positions of a record are {said}")
    for said, values in POSITIONS.items()
    for value in values
} | {
    "an id past the slots": (part(IDS, lambda found: found.clamp(max=0) + 8), "from 7 to 8; the map has slots 0 to 7"),
    "an id below -1": (part(IDS, lambda found: found - 1), "from -2 to"),
    "ids of fewer layers": (part(IDS, lambda found: found[:3]), "of shape (3, 5, 8)"),
    "ids of two dimensions": (part(IDS, lambda found: found[0]), "of 3 dimensions"),
    "another width": (part(IDS, lambda found: found[..., :7]), "2 widths of topk_ids_of_layer"),
    "no width": (part(IDS, lambda found: found[..., :0], every=True), "of shape (4, 5, 0)"),
    "an absurd width": (part(IDS, lambda found: found.repeat(1, 1, 9), every=True), "with 6 experts, top-66"),
    "nothing routed": (part(IDS, lambda found: 0 * found - 1, every=True), "1 widths of topk_ids_of_layer; expected"),
    "no tokens": (part(IDS, lambda found: found[:, :0], every=True), "positions of a record are not the 0 numbers"),
}
CASES = [
    *(("counts", name, *case) for name, case in OF_COUNTS.items()),
    *(("tokens", name, *case) for name, case in (IN_BOTH | OF_TOKENS).items()),
]


@pytest.mark.parametrize(
    ("form", "name", "edit", "expected"), CASES, ids=[f"{form}-{name}" for form, name, *_ in CASES]
)
def test_malformed_records_are_one_clear_line(tmp_path: Path, form: str, name: str, edit: Edit, expected: str) -> None:
    files = per_token(chosen(2, 3, 5), MAP) if form == "tokens" else per_pass(counted(2, 3), MAP)
    edit(files)
    refused(tmp_path, files, expected)
