"""Megatron-LM's router traces: tokens by rank, counts where stages differ, and everything that must be refused.

Legend: R ranks; B steps; L MoE layers; T tokens; K experts per token; E experts.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.errors import MismatchError
from moeplan.traces.count_form import read_counts
from moeplan.traces.importers import megatron_lines
from moeplan.traces.reader import open_trace
from moeplan.traces.schema import PHASES
from tests.traces.importers.recordings import (
    Files,
    config,
    counts_of,
    distinct_ids,
    imported,
    is_said,
    megatron,
    refused,
    tokens_of,
)

LAYERS, E, K = [1, 2, 3], 6, 2
FIRST, SECOND = "router_trace_rank0.jsonl", "router_trace_rank1.jsonl"


def routing(ranks: int, steps: int, layers: int = 3, tokens: int = 5, experts: int = E, top_k: int = K) -> Any:
    return distinct_ids(np.random.default_rng(0), (ranks, steps, layers, tokens), experts, top_k)


@settings(max_examples=20)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(0, 4), st.integers(1, 4))
def test_any_traces_come_back_by_rank_and_step(
    tmp_path_factory: pytest.TempPathFactory, ranks: int, steps: int, layers: int, tokens: int, top_k: int
) -> None:
    folder = tmp_path_factory.mktemp("import")
    ids_RBLTK = routing(ranks, steps, layers, tokens, 40, top_k)
    ids_RBLTK[:, 0, 0, :, 0] = np.arange(ranks)[:, None]  # no rank recorded another's tokens
    ids_RBLTK[0, 0, 0, :1, -1] = -1
    files = megatron(ids_RBLTK, list(range(2, 2 + layers)), hs_offset=0, hs_bytes=4)
    for rank, lines in enumerate(files.values()):
        lines.insert(layers, megatron(ids_RBLTK[:, :, :1], [0])[f"router_trace_rank{rank}.jsonl"][0] | {"block": "mtp"})
    files |= {"router_state_rank0.pt": {"3": {}}, "hidden_states_rank0.bin": b"\x00" * 64}
    if not tokens:
        refused(folder, files, "nothing was recorded", num_experts=40)
        return
    summary = imported(folder, files, config=config(2 + layers, 2, 40, top_k), phase="train")
    batch = tokens_of(folder / "trace")
    expected = ids_RBLTK.transpose(0, 1, 3, 2, 4).reshape(-1, layers, top_k)
    np.testing.assert_array_equal(batch.ids.astype(np.int16), expected)
    places = np.indices((ranks, steps, tokens)).reshape(3, -1)
    np.testing.assert_array_equal([batch.source_rank, batch.step, batch.position], places)
    assert ({PHASES[code] for code in batch.phase}, batch.sample) == ({"train"}, None)
    assert (summary.importer, summary.model.layer_ids) == ("megatron", tuple(range(2, 2 + layers)))
    assert open_trace(folder / "trace").meta.choice_order == "unknown"
    assert is_said(summary, "requests are unknown", "order of their ids")
    assert is_said(summary, "left out", "router_state_rank0.pt")


def test_stages_of_a_pipeline_give_counts_of_each_rank(tmp_path: Path) -> None:
    ids_RBLTK = routing(2, 3)
    lines = megatron(ids_RBLTK, [4, 5, 6])[SECOND]
    files = megatron(ids_RBLTK[:1], LAYERS) | {SECOND: lines + [line | {"step": 3} for line in lines[:3]]}
    summary = imported(tmp_path, files, num_experts=E)
    assert (summary.is_counts, summary.model.layer_ids, summary.model.top_k) == (True, (1, 2, 3, 4, 5, 6), K)
    assert read_counts(tmp_path / "trace").known == {"step", "source_rank"}
    counts = counts_of(tmp_path / "trace")
    for step, rank, place in np.ndindex(3, 2, 3):
        expected = np.bincount(ids_RBLTK[rank, step, place].ravel(), minlength=E)
        np.testing.assert_array_equal(counts[step][3 * rank + place], expected)
    assert is_said(summary, "pipeline stages")


def test_micro_batches_of_a_step_follow_each_other_and_recomputed_ones_count_once(tmp_path: Path) -> None:
    ids_RBLTK = routing(1, 2)
    lines = [line | {"step": 7} for line in megatron(ids_RBLTK, LAYERS)[FIRST]]
    summary = imported(tmp_path, {FIRST: [*lines, *lines[3:][::-1], *lines[:3][::-1]]})
    batch = tokens_of(tmp_path / "trace")
    np.testing.assert_array_equal(batch.ids, ids_RBLTK[0].transpose(0, 2, 1, 3).reshape(-1, 3, K))
    assert set(batch.step.tolist()) == {7}
    assert is_said(summary, "2 passes that repeat one of their step")


def test_ranks_that_share_their_tokens_are_counted_once(tmp_path: Path) -> None:
    summary = imported(tmp_path, megatron(routing(2, 2)[[0, 0, 1, 1]], LAYERS))
    assert summary.num_tokens == 2 * 2 * 5
    assert set(tokens_of(tmp_path / "trace").source_rank.tolist()) == {0, 2}
    assert is_said(summary, "ranks 1, 3 recorded the very tokens of others")
    assert is_said(summary, "--hf-config checks")


def test_a_pass_cut_off_at_the_end_is_left_out_and_said(tmp_path: Path) -> None:
    files = megatron(routing(1, 2), LAYERS)
    del files[FIRST][-1]
    summary = imported(tmp_path, files)
    assert (summary.num_tokens, summary.notes[-1]) == (5, "1 passes cut off at the end left out")


Edit = Callable[[Files], Any]


def line(place: int, **changes: Any) -> Edit:
    """Change a line of the first rank; None takes a key away."""

    def edit(files: Files) -> None:
        changed = files[FIRST][place] | changes
        files[FIRST][place] = {key: value for key, value in changed.items() if value is not None}

    return edit


def put(place: int, value: str) -> Edit:
    return lambda files: files[FIRST].__setitem__(place, value)


FIELDS: dict[str, tuple[Any, ...]] = {  # of a line, with values that they do not hold; None takes the key away
    "step": (None, -1, 2**31),
    "stage": ("post_dispatch",),
    "block": ("encoder",),
    "layer": (-1,),
    "rank": (2**40,),
    "top_indices": (None, [1, 2], [[1.5, 2]], [[-2, 2]] * 5, [[65535, 2]] * 5),
}
MALFORMED: dict[str, tuple[Edit, str]] = {
    f"{key} {value}": (line(1, **{key: value}), f"line 2: not a router's choices: {key}")
    for key, values in FIELDS.items()
    for value in values
} | {
    "nested deeply": (put(1, "[" * 100_000), "line 2: not a router's choices"),
    "steps that go back": (line(0, step=1), "line 2: step 0 after step 1"),
    "other layers": (line(4, layer=9), "line 4: rank 0, layers 1, 3, 9"),
    "a layer twice": (line(1, layer=1), "layers 1, 3"),
    "another rank": (line(3, rank=5), "line 4: rank 5, layers 1-3"),
    "a token less": (line(1, top_indices=[[1, 2]] * 4), "line 2: top_indices is not of 5 tokens with 2 experts each"),
    "a choice less": (line(1, top_indices=[[1, 2]] * 4 + [[1]]), "line 2: top_indices is not of 5 tokens"),
    "other tokens in a layer": (line(1, num_tokens=1, top_indices=[[1, 2]]), "line 1: layers of [(1, 2), (5, 2)]"),
    "other choices in a step": (
        lambda files: [edit(files) for edit in (line(place, topk=1, top_indices=[[1]] * 5) for place in (3, 4, 5))],
        "line 4: rank 0, layers 1-3, top-1",
    ),
    "an expert past those there are": (line(1, top_indices=[[6, 2]] * 5), "goes to expert 6 in layer 1"),
    "a rank missing": (lambda files: files.pop(FIRST), "ranks 1 and not 0; expected the files of all ranks together"),
    "a rank twice": (lambda files: files.update({"router_trace_rank7.jsonl": files[SECOND]}), "rank 1 as in"),
    "no decoder": (
        lambda files: files.update({FIRST: [line | {"block": "mtp"} for line in files[FIRST]]}),
        "router_trace_rank0.jsonl: no line of a decoder layer",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_trace_is_one_clear_line_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    edit, expected = MALFORMED[name]
    files = megatron(routing(2, 2), LAYERS)
    edit(files)
    refused(tmp_path, files, expected, num_experts=E)


@pytest.mark.parametrize(("limit", "line"), [("MAX_STEP_BYTES", 3), ("MAX_LINE_BYTES", 1)])
def test_endless_lines_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, line: int) -> None:
    monkeypatch.setattr(megatron_lines, limit, 50)
    refused(tmp_path, megatron(routing(1, 2), LAYERS), f"line {line}: over 50 bytes")


def test_ordinals_of_moe_layers_are_taken_for_those_of_the_config(tmp_path: Path) -> None:
    """As Megatron's replay numbers them."""
    summary = imported(tmp_path, megatron(routing(2, 2), [0, 1, 2]), config=config(4, 1, E, K))
    assert summary.model.layer_ids == (1, 2, 3)
    assert "layers 0-2 taken as the MoE layers 1-3" in summary.notes


@pytest.mark.parametrize("layers", [[0, 1, 3], [1, 2]])
def test_layers_that_are_not_those_of_the_config_are_refused(tmp_path: Path, layers: list[int]) -> None:
    told = ("recorded; config.json has experts in 1-3: ", " count from 0 each")
    files = megatron(routing(2, 2, len(layers)), layers)
    refused(tmp_path, files, *told, kind=MismatchError, config=config(4, 1, E, K))
