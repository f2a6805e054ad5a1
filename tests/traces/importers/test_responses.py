"""Responses with their routing, of SGLang and vLLM: cell by cell, phase by phase, and everything to be refused.

Legend: T tokens; H hidden layers; L MoE layers; E experts; K experts per token.
"""

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.errors import InputError, UsageError
from moeplan.traces.importers import import_trace, response_lines, responses
from moeplan.traces.schema import PHASES
from tests.traces.importers.recordings import (
    config,
    distinct_ids,
    imported,
    is_said,
    npy,
    openai_response,
    refused,
    sglang_response,
    tokens_of,
    vllm_response,
    write,
)

H, DENSE, E, K = 4, 1, 6, 2
CONFIG = config(H, DENSE, E, K)
KINDS: dict[str, Any] = {"native": sglang_response, "openai": openai_response, "vllm": vllm_response}


def routing(
    tokens: int, *, hidden: int = H, dense: int = DENSE, experts: int = E, top_k: int = K, seed: int = 0
) -> Any:
    """Ids `[T, H, K]` of different experts, dense layers zero, the first token's not all zero."""
    ids = distinct_ids(np.random.default_rng(seed), (tokens, hidden), experts, top_k)
    ids[:1, :, 0], ids[:1, :, 1:] = 1, np.arange(2, top_k + 1)
    ids[:, :dense] = 0
    return ids


@settings(max_examples=20)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(0, 3), st.sampled_from([*KINDS])), min_size=1),
    st.integers(64, 2000),
)
def test_any_responses_come_back_whatever_the_batch(
    tmp_path_factory: pytest.TempPathFactory, requests: list[tuple[int, int, int, str]], batch_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("import")
    lines, expected = [], []
    for sample, (tokens, prompt, start, kind) in enumerate(requests):
        prompt, start = min(prompt, tokens), min(start, tokens - 1) if sample and kind == "native" else 0
        ids = routing(tokens, seed=sample)
        lines.append(KINDS[kind](ids, prompt=prompt, **({"start": start} if kind == "native" else {})))
        expected += [
            (sample, place, "prefill" if place < prompt else "decode", ids[place, DENSE:].tolist())
            for place in range(start, tokens)
        ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(responses, "BLOCK_BYTES", batch_bytes)
        summary = imported(folder, {"r.jsonl": lines}, config=CONFIG)
    batch = tokens_of(folder / "trace")
    phases = [PHASES[code] for code in batch.phase]
    columns = (batch.sample.tolist(), batch.position.tolist(), phases, batch.ids.tolist())
    assert list(zip(*columns, strict=True)) == expected
    assert batch.step is None
    assert (summary.importer, summary.num_samples, summary.model.layer_ids) == ("responses", len(requests), (1, 2, 3))
    assert is_said(summary, "no gate weights")


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.int32, np.dtype(">u2")])
def test_vllm_needs_no_config_where_every_layer_has_experts(tmp_path: Path, kind: Any) -> None:
    ids = [routing(tokens, dense=0, seed=tokens).astype(kind) for tokens in (4, 9)]
    lines = [vllm_response(ids[0]), vllm_response(np.asfortranarray(ids[1]))]
    summary = imported(tmp_path, {"r.jsonl": lines}, num_experts=E)
    np.testing.assert_array_equal(tokens_of(tmp_path / "trace").ids, np.concatenate(ids))
    assert summary.model.layer_ids == tuple(range(H))


def test_the_rank_that_answered_is_the_source_rank(tmp_path: Path) -> None:
    lines = [sglang_response(routing(tokens), dp_rank=tokens % 4) for tokens in (4, 9)]
    imported(tmp_path, {"r.jsonl": lines}, config=CONFIG)
    assert tokens_of(tmp_path / "trace").source_rank.tolist() == [0] * 4 + [1] * 9


def test_lists_choices_and_several_files_are_one_recording_whose_prompts_are_not_guessed(tmp_path: Path) -> None:
    ids = [routing(tokens, dense=0, seed=tokens) for tokens in (4, 9, 3, 2)]
    files = {
        "a1.jsonl": [[vllm_response(ids[0]), vllm_response(ids[1])]],
        "a2.jsonl": [vllm_response(ids[2], ids[3])],
    }
    summary = imported(tmp_path, files, phase="prefill")
    import_trace([tmp_path / "in" / name for name in files], tmp_path / "same")
    for trace in ("trace", "same"):
        np.testing.assert_array_equal(tokens_of(tmp_path / trace).ids, np.concatenate(ids))
    batch = tokens_of(tmp_path / "trace")
    assert batch.sample.tolist() == np.repeat(range(4), [4, 9, 3, 2]).tolist()
    assert {PHASES[code] for code in batch.phase[13:]} == {"prefill"}
    assert is_said(summary, "2 responses do not tell the length of their prompt: prefill taken")


def test_a_layer_of_zeros_and_raw_routing_need_the_config(tmp_path: Path) -> None:
    lines = [vllm_response(routing(4)), vllm_response(routing(9))]
    refused(tmp_path, {"r.jsonl": lines}, "hidden layers 0 are all zeros, ", "; give --hf-config config.json")
    told = "do not tell how many layers and experts per token"
    refused(tmp_path, {"r.jsonl": [sglang_response(routing(4))]}, told, kind=UsageError)


def test_a_long_text_before_the_routing_hides_it_from_nobody(tmp_path: Path) -> None:
    answer = {"text": '"so" it goes ' * 50_000} | vllm_response(routing(4, dense=0))
    assert imported(tmp_path, {"r.jsonl": [answer]}).importer == "responses"


def packed(array: Any, **changes: bytes) -> str:
    data = npy(array)
    for old, new in changes.items():
        data = data.replace(old.encode(), new)
    return base64.b64encode(data).decode()


def vllm(routed: Any) -> dict[str, Any]:
    return {"choices": [{"routed_experts": routed}]}


def native(routed: Any, **told: Any) -> dict[str, Any]:
    return {"meta_info": {"routed_experts": routed, **told}}


def raw(*values: int) -> str:
    return base64.b64encode(np.array(values, "<i4").tobytes()).decode()


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_chunks_of_a_stream_and_files_given_twice_are_not_counted_double(tmp_path: Path, make: Any) -> None:
    whole = make(routing(9))
    chunk = make(routing(4))
    for holder in (whole, chunk):
        holder.get("meta_info", holder)["id"] = "one"
    write(tmp_path, {"config.json": CONFIG, "r.jsonl": [chunk, whole], "s1.jsonl": [whole], "s2.jsonl": [whole]})
    for files in (["r.jsonl"], ["s1.jsonl", "s2.jsonl"]):
        with pytest.raises(InputError, match="id 'one' for the second time: a stream's chunks, or a response twice"):
            import_trace([tmp_path / name for name in files], tmp_path / "trace", hf_config=tmp_path / "config.json")
    with pytest.raises(InputError, match=r"s1\.jsonl is given twice; it would be counted double"):
        import_trace([tmp_path / "s1.jsonl", tmp_path / "s1.jsonl"], tmp_path / "trace")


def test_a_layer_of_cells_that_are_not_routed_is_not_recorded(tmp_path: Path) -> None:
    ids = routing(4)
    ids[:, 1:] = -1
    told = "hidden layers 1-3 have experts by config.json, and nothing was recorded"
    refused(tmp_path, {"r.jsonl": [vllm_response(ids.astype(np.int16))]}, told, config=CONFIG)


GOOD = vllm_response(routing(4))
SIZED, MOST_BYTES = "(4, 4, 2), }", 200_000
MALFORMED: dict[str, tuple[Any, str]] = {
    "nested deeply": ("[" * 100_000, "line 2: no JSON"),
    "a line without end": ('{"text": "' + "a" * MOST_BYTES, f"line 2: over {MOST_BYTES:,} bytes"),
    "a list in a list": ("[[]]", "line 2: []; expected a response"),
    "an error": ({"error": {"message": "overloaded"}}, "line 2: no routed_experts"),
    "no routing in a choice": (vllm(None), "line 2: no routed_experts"),
    "a choice that is none": ({"choices": [1]}, "line 2: no routed_experts"),
    "routing as a list": (vllm([[[0, 1]]]), "line 2: routed_experts [[[0, 1]]]; expected base64"),
    "no base64": (vllm("!!!!"), "line 2: routed_experts is no base64"),
    "no npy": (vllm(raw(1, 2, 3, 4)), "line 2: routed_experts: damaged"),
    "an npy of objects": (vllm(packed(np.array([[[{}]]], dtype=object))), "line 2: routed_experts: elements of type o"),
    "an npy of floats": (vllm(packed(routing(4) * 1.0)), "line 2: routed_experts is float64"),
    "an npy of two dimensions": (vllm(packed(routing(4)[0])), "line 2: routed_experts is int64 (4, 2)"),
    "an npy of more layers": (vllm(packed(routing(4, hidden=5))), "line 2: 5 layers, top-2"),
    "an npy of other choices": (vllm(packed(routing(4, top_k=3))), "line 2: 4 layers, top-3"),
    "an npy of an absurd size": (vllm(packed(routing(4), **{SIZED: b"(4,4000000,2)}"})), "2: routed_experts: header"),
    "an npy cut off": (vllm(packed(routing(4), **{SIZED: b"(5, 4, 2), }"})), "promises int64 (5, 4, 2)"),
    "an id past the experts": (vllm(packed(routing(4) + 5)), "row 4 goes to expert 6 in layer 0; expected 0 to 5"),
    "more tokens than were answered": (
        {**vllm(packed(routing(4))), "usage": {"prompt_tokens": 2, "completion_tokens": 2}},
        "line 2: routing of 4 tokens in a response of 4",
    ),
    "tokens below 0": (native(raw(), prompt_tokens=-2), "line 2: prompt_tokens -2"),
    "absurdly many tokens": (native(raw(), completion_tokens=2**30), "line 2: completion_tokens 1073741824"),
    "a rank where the first had none": (native(raw(*range(8)), dp_rank=1), "line 2: 4 layers, top-2, dp_rank 1"),
    "a rank in words": (native(raw(*range(8)), dp_rank="1"), "line 2: dp_rank 1; expected a number"),
    "rows cut off": (native(raw(*range(9))), "line 2: routed_experts is 36 bytes; expected rows of 32"),
    "raw ids past 16 bits": (native(raw(*[2**20] * 8)), "expert id 1048576"),
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_response_leaves_only_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(response_lines, "MAX_LINE_BYTES", MOST_BYTES)
    line, expected = MALFORMED[name]
    refused(tmp_path, {"r.jsonl": [GOOD, line]}, expected, config=CONFIG)


@pytest.mark.parametrize("lines", [['{"routed_experts": 1}'], ["[]", '"routed_experts"'], [vllm(packed(routing(0)))]])
def test_files_without_any_routing_are_refused(tmp_path: Path, lines: list[Any]) -> None:
    refused(tmp_path, {"r.jsonl": lines}, config=CONFIG)
