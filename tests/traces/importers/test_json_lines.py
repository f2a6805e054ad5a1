"""The importer of JSON lines: round trips, both layouts, and hostile content, each refused by its line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.errors import UsageError
from moeplan.traces.importers import json_lines, json_tokens
from moeplan.traces.schema import PHASES
from tests.traces.importers.recordings import imported, is_said, refused, tokens_of

TOKEN = {"sample": 1, "position": 0, "experts": [[1, 2], [0, 3]]}


@st.composite
def recordings(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Tokens of one shape, each with or without each optional key."""
    layers, top_k = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    row = st.lists(st.integers(-1, 9), min_size=top_k, max_size=top_k)
    token: dict[str, Any] = {"experts": st.lists(row, min_size=layers, max_size=layers)}
    optional = {
        "position": st.integers(0, 2**31 - 1),
        "sample": st.integers(-(2**63), 2**63 - 1),
        "step": st.integers(-(2**31), 2**31 - 1),
        "source_rank": st.integers(0, 99),
        "phase": st.sampled_from(PHASES),
    }
    token |= {name: optional[name] for name in draw(st.sets(st.sampled_from(sorted(optional))))}
    return draw(st.lists(st.fixed_dictionaries(token), min_size=1, max_size=12))


@settings(max_examples=40)
@given(recordings(), st.booleans())
def test_tokens_come_back_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, tokens: list[dict[str, Any]], windows: bool
) -> None:
    folder = tmp_path_factory.mktemp("import")
    end, start = ("\r\n", "\ufeff") if windows else ("\n", "")
    text = start + end.join(json.dumps(token) for token in tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_lines, "MAX_ROWS", 3)
        summary = imported(folder, {"r.jsonl": text.encode()}, num_experts=10)
    batch = tokens_of(folder / "trace")
    assert (summary.importer, summary.num_tokens) == ("json_lines", len(tokens))
    np.testing.assert_array_equal(batch.ids.astype(np.int16), [token["experts"] for token in tokens])
    assert batch.position.tolist() == [token.get("position", place) for place, token in enumerate(tokens)]
    for name in ("sample", "step", "source_rank"):
        column = getattr(batch, name)
        expected = [token[name] for token in tokens] if name in tokens[0] else None
        assert (None if column is None else column.tolist()) == expected
    assert [PHASES[phase] for phase in batch.phase] == [token.get("phase", "decode") for token in tokens]


def test_choices_are_put_in_the_order_of_their_weights(tmp_path: Path) -> None:
    summary = imported(tmp_path, {"r.jsonl": [TOKEN | {"weights": [[0.25, 0.5], [0.5, 0.25]]}]})
    batch = tokens_of(tmp_path / "trace", weights=True)
    assert batch.ids.tolist() == [[[2, 1], [0, 3]]]
    assert batch.weights.tolist() == [[[0.5, 0.25], [0.5, 0.25]]]
    assert is_said(summary, "1 cells were not in the order")


def test_a_line_a_layer_makes_tokens_whose_layers_keep_their_names(tmp_path: Path) -> None:
    lines = [
        {"sample": 1, "position": position, "layer": layer, "experts": [layer % 3, 3], "weights": [0.75, 0.25]}
        for position in range(3)
        for layer in ((5, 9) if position else (9, 5))
    ]
    summary = imported(tmp_path, {"r.jsonl": lines})
    batch = tokens_of(tmp_path / "trace", weights=True)
    assert summary.model.layer_ids == (5, 9)
    assert batch.ids.tolist() == [[[2, 3], [0, 3]]] * 3
    assert batch.weights.tolist() == [[[0.75, 0.25]] * 2] * 3
    assert batch.position.tolist() == [0, 1, 2]


def test_a_header_says_what_the_model_is_and_options_may_not_contradict_it(tmp_path: Path) -> None:
    header = {"model": {"name": "mine", "num_experts": 8, "layer_ids": [3, 4], "attention": {"kv_size": 16}}}
    files = {"r.jsonl": [header, TOKEN]}
    model = imported(tmp_path, files, hidden_size=64).model
    assert (model.name, model.num_experts, model.layer_ids, model.top_k) == ("mine", 8, (3, 4), 2)
    assert (model.hidden_size, model.attention.kv_size) == (64, 16)
    refused(tmp_path, files, "num_experts 9 asked for; the file says 8", kind=UsageError, to="other", num_experts=9)
    refused(tmp_path, files, "kv_size 1 asked for; the file says 16", kind=UsageError, to="other", kv_size=1)


def test_named_samples_keep_apart_and_equal_names_together(tmp_path: Path) -> None:
    lines = [TOKEN | {"sample": name, "position": 0} for name in ("a", "b", "a", "\u00e9")]
    summary = imported(tmp_path, {"r.jsonl": lines})
    samples = tokens_of(tmp_path / "trace").sample.tolist()
    assert samples[0] == samples[2]
    assert len(set(samples)) == 3
    assert min(samples) >= 0
    assert is_said(summary, "hashes")


@pytest.mark.parametrize(
    ("tokens", "note"),
    [
        ([TOKEN | {"token_id": 7, "logits": []}], "keys left out: logits, token_id"),
        ([TOKEN | {"\x1b]0;owned\x07": 1}], r"keys left out: \x1b]0;owned\x07"),
        (
            [TOKEN, TOKEN | {"experts": [[1, 1], [-1, -1]]}, TOKEN | {"experts": [[2, 2], [3, 3]]}],
            "3 cells name an expert twice, which counts twice",
        ),
    ],
)
def test_what_is_left_out_or_odd_is_noted(tmp_path: Path, tokens: list[Any], note: str) -> None:
    assert note in imported(tmp_path, {"r.jsonl": tokens}).notes


EXPERTS: list[tuple[Any, str]] = [  # of the second line, and what is said of them there
    ([[1, True], [0, 3]], "valid integer"),
    ([[1, 1.0], [0, 3]], "valid integer"),
    ([[1, -2], [0, 3]], "greater than or equal to -1"),
    ([[1, 65536], [0, 3]], "less than or equal to 65535"),
    ([[1, 2], [0]], "experts of another shape"),
    ([[1, 2, 3], [0, 1, 2]], "experts per layer: 3; the first token has 2"),
    ([[1, 2]], "layers: 1; the first token has 2"),
    ([1, 2], "experts of another shape"),
]
KEYS: list[tuple[str, Any, str]] = [  # of the second line
    ("weights", [[1, 2], [0, 3]], "weights: some; the first token has none"),
    ("position", -1, "position"),
    ("position", None, "position: none"),
    ("sample", "a", "sample: a name; the first token has a number"),
    ("sample", 2**63, ""),
    ("step", 2**31, "step"),
    ("phase", "dreaming", "phase"),
]
LINES: list[tuple[list[Any], str]] = [
    ([{"experts": []}], "line 1: experts of another shape"),
    ([{"experts": [[]]}], "line 1: experts of another shape"),
    ([TOKEN, {"position": 3}], "line 2: not a token: experts"),
    ([TOKEN | {"weights": [[1, 2], [0]]}], "line 1: weights of another shape"),
    ([TOKEN | {"weights": [[1, 2]]}], "line 1: weights of another shape"),
    (['{"experts": [[1]], "weights": [[NaN]]}'], "finite"),
    (['{"experts": [[1]], "weights": [[1e999]]}'], "line 1: "),
    (['{"experts": [[1]], "weights": [[70000]]}'], "65504"),
    ([TOKEN, "", "[1, 2]"], "line 3: not a token"),
    ([TOKEN, '{"experts": [[1, 2'], "JSON"),
    ([TOKEN, "[" * 100_000], "line 2: not a token"),
    ([TOKEN, TOKEN, "\x00"], "line 3: not a token"),
    ([{"layer": 1, "experts": [1]}, {"layer": 1, "experts": [2]}], "line 1: a token of 2 lines in 1 layers"),
    ([{"layer": 1, "experts": [1]}, {"layer": 2, "experts": [2], "weights": [1]}], "line 1: weights of another shape"),
    (
        [{"position": 0, "layer": 1, "experts": [1]}, {"position": 1, "layer": 2, "experts": [1]}],
        "line 2: layers: 1 (2,); the first token has 1 (1,)",
    ),
    ([{"model": {"num_experts": 3}}], "no token"),
]
HEADERS: list[tuple[Any, str]] = [
    ({"num_experts": 3}, "line 2: expert 3; the header says there are 3"),
    ({"num_experts": "3"}, "line 1: not a header: model.num_experts"),
    ({"colour": 3}, "not a model"),
    ({"layer_ids": [1]}, "layer_ids"),
    ({"layer_ids": [5, 9999999999999]}, "ascending from 0 to at most 2,147,483,647"),
    ({"top_k": 3}, "top_k is not the 2 experts of line 2"),
    ({"attention": 7}, "line 1: not a header: model.attention"),
    (3, "line 1: not a header"),
]
REFUSED = [
    *(([TOKEN, TOKEN | {"experts": experts}], ("line 2: ", said)) for experts, said in EXPERTS),
    *(([TOKEN, TOKEN | {key: value}], ("line 2: ", said)) for key, value, said in KEYS),
    *((lines, (said,)) for lines, said in LINES),
    *(([{"model": model}, TOKEN], (said,)) for model, said in HEADERS),
]


@pytest.mark.parametrize(("lines", "said"), REFUSED)
def test_a_bad_line_is_named_and_nothing_is_written(tmp_path: Path, lines: list[Any], said: tuple[str, ...]) -> None:
    refused(tmp_path, {"r.jsonl": lines}, *said)


@pytest.mark.parametrize(
    ("limit", "value", "lines", "said"),
    [
        ("MAX_LINE_BYTES", 1000, [TOKEN, '{"experts": [[' + "1," * 1000], "line 2: over 1,000 bytes"),
        ("MAX_LAYERS", 5, [{"layer": layer, "experts": [1]} for layer in range(9)], "line 1: a token of 6 lines"),
    ],
)
def test_what_has_no_end_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, lines: list[Any], said: str
) -> None:
    monkeypatch.setattr(json_tokens, limit, value)
    refused(tmp_path, {"r.jsonl": lines}, said)
