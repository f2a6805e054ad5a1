"""The importer of JSON lines: round trips, both layouts, and hostile content, each refused by its line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.errors import InputError, UsageError
from moeplan.traces.importers import import_trace, json_lines, json_tokens
from moeplan.traces.reader import open_trace
from moeplan.traces.schema import PHASES

TOKEN = {"sample": 1, "position": 0, "experts": [[1, 2], [0, 3]]}


def write(path: Path, *lines: Any) -> Path:
    """Lines of text as they are, anything else as JSON."""
    path.write_bytes(b"".join((line if isinstance(line, str) else json.dumps(line)).encode() + b"\n" for line in lines))
    return path


def read(path: Path, **options: Any) -> Any:
    (batch,) = open_trace(path).batches(**options)
    return batch


@st.composite
def recordings(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Tokens of one shape, each with or without each optional key."""
    layers, top_k = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    row = st.lists(st.integers(-1, 9), min_size=top_k, max_size=top_k)
    token = {
        "position": st.integers(0, 2**31 - 1),
        "experts": st.lists(row, min_size=layers, max_size=layers),
    }
    optional = {
        "sample": st.integers(-(2**63), 2**63 - 1),
        "step": st.integers(-(2**31), 2**31 - 1),
        "source_rank": st.integers(0, 99),
        "phase": st.sampled_from(PHASES),
    }
    token |= {name: optional[name] for name in draw(st.sets(st.sampled_from(sorted(optional))))}
    return draw(st.lists(st.fixed_dictionaries(token), min_size=1, max_size=12))


@settings(deadline=None, max_examples=40)
@given(recordings(), st.booleans())
def test_tokens_come_back_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, tokens: list[dict[str, Any]], windows: bool
) -> None:
    folder = tmp_path_factory.mktemp("import")
    end, start = ("\r\n", "\ufeff") if windows else ("\n", "")
    text = start + end.join(json.dumps(token) for token in tokens)
    (folder / "r.jsonl").write_bytes(text.encode())
    summary = import_trace(folder / "r.jsonl", folder / "trace", num_experts=10)
    batch = read(folder / "trace")
    assert summary.importer == "json_lines"
    assert summary.num_tokens == len(tokens)
    np.testing.assert_array_equal(batch.ids.astype(np.int16), [token["experts"] for token in tokens])
    np.testing.assert_array_equal(batch.position, [token["position"] for token in tokens])
    for name in ("sample", "step", "source_rank"):
        found = getattr(batch, name)
        assert (None if found is None else found.tolist()) == (
            [token[name] for token in tokens] if name in tokens[0] else None
        )
    assert [PHASES[phase] for phase in batch.phase] == [token.get("phase", "decode") for token in tokens]


def test_batches_smaller_than_the_file_hold_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "MAX_ROWS", 3)
    tokens = [{"experts": [[token % 5]]} for token in range(11)]
    import_trace(write(tmp_path / "r.jsonl", *tokens), tmp_path / "trace")
    batch = read(tmp_path / "trace")
    assert batch.ids[:, 0, 0].tolist() == [token % 5 for token in range(11)]
    assert batch.position.tolist() == list(range(11))


def test_choices_are_put_in_the_order_of_their_weights(tmp_path: Path) -> None:
    token = TOKEN | {"weights": [[0.25, 0.5], [0.5, 0.25]]}
    summary = import_trace(write(tmp_path / "r.jsonl", token), tmp_path / "trace")
    batch = read(tmp_path / "trace", weights=True)
    assert batch.ids.tolist() == [[[2, 1], [0, 3]]]
    assert batch.weights.tolist() == [[[0.5, 0.25], [0.5, 0.25]]]
    assert any("1 cells were not in the order" in note for note in summary.notes)


def test_a_line_a_layer_makes_tokens_whose_layers_keep_their_names(tmp_path: Path) -> None:
    lines = [
        {"sample": 1, "position": position, "layer": layer, "experts": [layer % 3, 3], "weights": [0.75, 0.25]}
        for position in range(3)
        for layer in ((5, 9) if position else (9, 5))
    ]
    summary = import_trace(write(tmp_path / "r.jsonl", *lines), tmp_path / "trace")
    batch = read(tmp_path / "trace", weights=True)
    assert summary.model.layer_ids == (5, 9)
    assert batch.ids.tolist() == [[[2, 3], [0, 3]]] * 3
    assert batch.weights.tolist() == [[[0.75, 0.25]] * 2] * 3
    assert batch.position.tolist() == [0, 1, 2]


def test_a_header_says_what_the_model_is_and_options_may_not_contradict_it(tmp_path: Path) -> None:
    header = {"model": {"name": "mine", "num_experts": 8, "layer_ids": [3, 4], "attention": {"kv_size": 16}}}
    path = write(tmp_path / "r.jsonl", header, TOKEN)
    model = import_trace(path, tmp_path / "trace", hidden_size=64).model
    assert (model.name, model.num_experts, model.layer_ids, model.top_k) == ("mine", 8, (3, 4), 2)
    assert (model.hidden_size, model.attention.kv_size) == (64, 16)
    with pytest.raises(UsageError, match="num_experts 9 asked for; the file says 8"):
        import_trace(path, tmp_path / "other", num_experts=9)
    with pytest.raises(UsageError, match="kv_size 1 asked for; the file says 16"):
        import_trace(path, tmp_path / "other", kv_size=1)
    assert not (tmp_path / "other").exists()


def test_named_samples_keep_apart_and_equal_names_together(tmp_path: Path) -> None:
    lines = [TOKEN | {"sample": name, "position": 0} for name in ("a", "b", "a", "\u00e9")]
    summary = import_trace(write(tmp_path / "r.jsonl", *lines), tmp_path / "trace")
    samples = read(tmp_path / "trace").sample.tolist()
    assert samples[0] == samples[2]
    assert len(set(samples)) == 3
    assert min(samples) >= 0
    assert any("hashes" in note for note in summary.notes)


def test_keys_of_others_are_left_out_and_told(tmp_path: Path) -> None:
    summary = import_trace(write(tmp_path / "r.jsonl", TOKEN | {"token_id": 7, "logits": []}), tmp_path / "trace")
    assert "keys left out: logits, token_id" in summary.notes


def test_keys_that_steer_a_terminal_are_escaped_in_the_notes(tmp_path: Path) -> None:
    summary = import_trace(write(tmp_path / "r", TOKEN | {"\x1b]0;owned\x07": 1}), tmp_path / "trace")
    assert any(r"left out: \x1b]0;owned\x07" in note for note in summary.notes)


def test_an_expert_twice_in_a_cell_is_taken_and_noted(tmp_path: Path) -> None:
    tokens = [TOKEN, TOKEN | {"experts": [[1, 1], [-1, -1]]}, TOKEN | {"experts": [[2, 2], [3, 3]]}]
    summary = import_trace(write(tmp_path / "r", *tokens), tmp_path / "trace")
    assert "3 cells name an expert twice, which counts twice" in summary.notes


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([TOKEN, TOKEN | {"experts": [[1, True], [0, 3]]}], "line 2: .*valid integer"),
        ([TOKEN, TOKEN | {"experts": [[1, 1.0], [0, 3]]}], "line 2: .*valid integer"),
        ([TOKEN, TOKEN | {"experts": [[1, "2"], [0, 3]]}], "line 2: .*valid integer"),
        ([TOKEN, TOKEN | {"experts": [[1, None], [0, 3]]}], "line 2: .*valid integer"),
        ([TOKEN, TOKEN | {"experts": [[1, -2], [0, 3]]}], "line 2: .*greater than or equal to -1"),
        ([TOKEN, TOKEN | {"experts": [[1, 65536], [0, 3]]}], "line 2: .*less than or equal to 65535"),
        ([TOKEN, TOKEN | {"experts": [[1, 10**30], [0, 3]]}], "line 2: "),
        ([TOKEN, TOKEN | {"experts": [[1, 2], [0]]}], "line 2: experts of another shape"),
        ([TOKEN, TOKEN | {"experts": [[1, 2, 3], [0, 1, 2]]}], "line 2: experts a layer: 3; the first token has 2"),
        ([TOKEN, TOKEN | {"experts": [[1, 2]]}], "line 2: layers: 1; the first token has 2"),
        ([TOKEN, TOKEN | {"experts": [1, 2]}], "line 2: experts of another shape"),
        ([TOKEN, TOKEN | {"experts": [[[1, 2]], [[0, 3]]]}], "line 2: "),
        ([{"experts": []}], "line 1: experts of another shape"),
        ([{"experts": [[]]}], "line 1: experts of another shape"),
        ([TOKEN, {"position": 3}], "line 2: not a token: experts"),
        ([TOKEN, TOKEN | {"weights": [[1, 2], [0, 3]]}], "line 2: weights: some; the first token has none"),
        ([TOKEN | {"weights": [[1, 2], [0]]}], "line 1: weights of another shape"),
        ([TOKEN | {"weights": [[1, 2]]}], "line 1: weights of another shape"),
        (['{"experts": [[1]], "weights": [[NaN]]}'], "line 1: .*finite"),
        (['{"experts": [[1]], "weights": [[1e999]]}'], "line 1: "),
        (['{"experts": [[1]], "weights": [[70000]]}'], "line 1: .*65504"),
        ([TOKEN, TOKEN | {"position": -1}], "line 2: .*position"),
        ([TOKEN, TOKEN | {"position": None}], "line 2: position: none"),
        ([TOKEN, TOKEN | {"position": True}], "line 2: .*position"),
        ([TOKEN, TOKEN | {"sample": "a"}], "line 2: sample: a name; the first token has a number"),
        ([TOKEN, TOKEN | {"sample": 2**63}], "line 2: "),
        ([TOKEN, TOKEN | {"step": 2**31}], "line 2: .*step"),
        ([TOKEN, TOKEN | {"phase": "dreaming"}], "line 2: .*phase"),
        ([TOKEN, "", "[1, 2]"], "line 3: not a token"),
        ([TOKEN, '{"experts": [[1, 2'], "line 2: not a token: .*JSON"),
        ([TOKEN, "[" * 100_000], "line 2: not a token"),
        ([TOKEN, "\x00"], "line 2: not a token"),
        (["{"], "line 1: not a token"),
        (['{"model": {"num_experts": 3}}'], "no token"),
        (['{"model": {"num_experts": 3}}', TOKEN], "line 2: expert 3; the header says there are 3"),
        (['{"model": {"num_experts": "3"}}', TOKEN], "line 1: not a header: model.num_experts"),
        (['{"model": {"colour": 3}}', TOKEN], "not a model"),
        (['{"model": {"layer_ids": [1]}}', TOKEN], "layer_ids"),
        (['{"model": {"layer_ids": [5, 9999999999999]}}', TOKEN], "ascending from 0 to at most 2,147,483,647"),
        (['{"model": {"top_k": 3}}', TOKEN], "top_k is not the 2 experts of line 2"),
        (['{"model": {"layer_ids": "ab"}}', TOKEN], "line 1: not a header: model.layer_ids"),
        (['{"model": {"attention": 7}}', TOKEN], "line 1: not a header: model.attention"),
        (['{"model": 3}', TOKEN], "line 1: not a header"),
        ([{"layer": 1, "experts": [1]}, {"layer": 1, "experts": [2]}], "line 1: a token of 2 lines in 1 layers"),
        (
            [{"layer": 1, "experts": [1]}, {"layer": 2, "experts": [2], "weights": [1]}],
            "line 1: weights of another shape",
        ),
        (
            [{"position": 0, "layer": 1, "experts": [1]}, {"position": 1, "layer": 2, "experts": [1]}],
            r"line 2: layers: 1 \(2,\); the first token has 1 \(1,\)",
        ),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_written(tmp_path: Path, lines: list[Any], expected: str) -> None:
    path = write(tmp_path / "r.jsonl", *lines)
    with pytest.raises(InputError, match=expected) as refused:
        import_trace(path, tmp_path / "trace")
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 600 + len(str(path))
    assert [found.name for found in tmp_path.iterdir()] == ["r.jsonl"]


def test_a_line_without_end_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_tokens, "MAX_LINE_BYTES", 1000)
    path = write(tmp_path / "r.jsonl", TOKEN, '{"experts": [[' + "1," * 1000)
    with pytest.raises(InputError, match="line 2: over 1,000 bytes"):
        import_trace(path, tmp_path / "trace")


def test_lines_of_one_token_without_end_are_refused_before_they_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_tokens, "MAX_LAYERS", 5)
    path = write(tmp_path / "r.jsonl", *({"layer": layer, "experts": [1]} for layer in range(9)))
    with pytest.raises(InputError, match="line 1: a token of 6 lines"):
        import_trace(path, tmp_path / "trace")


def test_a_damaged_byte_is_refused_by_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", TOKEN)
    path.write_bytes(path.read_bytes() * 2 + b'{"experts": [[1, 2], [0, 3]], "sample": "\xff\xfe"}')
    with pytest.raises(InputError, match="line 3: not a token"):
        import_trace(path, tmp_path / "trace")
