"""Samples out of texts and JSON lines, and what is refused of them."""

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moeplan.errors import InputError, MoeplanError, UsageError
from moeplan.traces.huggingface import prompts as module
from moeplan.traces.huggingface.checkpoint import load_tokenizer, tokenizer_label
from moeplan.traces.huggingface.prompts import Prompts, dataset_prompts, text_prompts

CHAT = "{% for m in messages %}{{ m['content'] }},{% endfor %}{% if add_generation_prompt %}z{% endif %}"


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Callable[..., Path]) -> Any:
    return load_tokenizer(checkpoint("mixtral"))


def lines(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n\n")
    return path


def test_a_text_is_cut_into_equal_samples_and_its_rest_left_out(tokenizer: Any) -> None:
    pieces = text_prompts("abcdefg", tokenizer, 3)
    assert tokenizer.batch_decode(pieces) == ["a b c", "d e f"]
    with pytest.raises(UsageError, match="7 tokens does not fill a sample of 8"):
        text_prompts("abcdefg", tokenizer, 8)


def test_an_empty_prompt_is_skipped_and_counted_even_where_every_text_begins_with_a_token(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = lines(tmp_path / "d", {"text": "ab"}, {"prompt": ""}, {"text": ""}, {"text": "c"})
    found = dataset_prompts(data, tokenizer)
    assert tokenizer.batch_decode(found.samples) == ["a b", "c"]
    assert found.num_empty == 2
    monkeypatch.setattr(type(tokenizer), "__call__", lambda *_, add_special_tokens: {"input_ids": [add_special_tokens]})
    assert dataset_prompts(data, tokenizer) == Prompts([[1], [1]], 2)
    monkeypatch.setattr(tokenizer, "chat_template", CHAT)
    talk = {"messages": [{"role": "user", "content": "ab"}]}
    assert dataset_prompts(lines(tmp_path / "d", talk), tokenizer) == Prompts([[0]], 0)  # the template has them


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        ("", InputError, "no line"),
        ("[" * 200_000, InputError, "line 1 is no JSON"),
        ("[1]", InputError, "line 1 is no JSON object"),
        ('{"text": "a"}\n{"body": "b"}', InputError, r"line 2 has keys \['body'\]"),
        ('{"text": 3}', InputError, "text is int"),
        ('{"text": ""}\n{"prompt": ""}', InputError, "2 lines, all empty"),
        ('{"text": "\\ud800"}', InputError, "line 1: its text holds half a surrogate pair"),
        ('{"text": "' + "a" * 2**22 + '"}', InputError, "line 1 has 4,194,316 characters"),
        ('{"' + "k" * 5000 + '": 1}', InputError, "line 1 has keys"),
        ('{"messages": [{"role": "user", "content": "a"}]}', UsageError, "no chat template"),
    ],
)
def test_a_line_that_is_no_sample_is_refused(
    tokenizer: Any, tmp_path: Path, content: str, kind: type[MoeplanError], words: str
) -> None:
    (tmp_path / "d.jsonl").write_text(content)
    with pytest.raises(kind, match=words) as refused:
        dataset_prompts(tmp_path / "d.jsonl", tokenizer)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("messages", [[], "ab", [3], [{"content": 4, "role": {}}]])
def test_messages_that_are_none_are_refused(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: Any
) -> None:
    refusal = "{{ raise_exception('no') if messages[0]['content'] is number else '' }}"
    monkeypatch.setattr(tokenizer, "chat_template", refusal)
    with pytest.raises(InputError, match="line 1"):
        dataset_prompts(lines(tmp_path / "d", {"messages": messages}), tokenizer)


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (ENDLESS + "{% endfor %}", "does not end within 1 s"),
        ("{{ 'a' * 10 ** 11 }}", "it fills the memory"),
        ("{{ 'a' * 10 ** 7 }}", "10,000,000 characters"),
        ("{{ 1 // 0 }}", "refuses its messages"),
        ("{{ '\\ud800' }}", "its messages holds half a surrogate pair"),
        ("{% if %}", "refuses its messages"),
        ("", "its messages gives no token"),
    ],
)
def test_a_chat_template_that_fails_or_does_not_end_is_refused_with_its_line(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, words: str
) -> None:
    monkeypatch.setattr(module, "MAX_SECONDS", 1)
    monkeypatch.setattr(tokenizer, "chat_template", template)
    data = lines(tmp_path / "d", {"text": "a"}, {"messages": [{"role": "user", "content": "b"}]})
    with pytest.raises(InputError, match=f"line 2.*{words}"):
        dataset_prompts(data, tokenizer)
    assert not multiprocessing.active_children()


def test_texts_and_talks_stay_in_order(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", CHAT)
    talks = [
        {"messages": [{"role": "user", "content": words} for words in talk]} for talk in (["ab"], ["cd", "c"], ["ef"])
    ]
    prompts = dataset_prompts(lines(tmp_path / "d", *talks[:2], {"text": "gh", "id": 4}, talks[2]), tokenizer)
    assert tokenizer.batch_decode(prompts.samples) == ["a b , z", "c d , c , z", "g h", "e f , z"]


def test_a_tokenizers_label_changes_with_its_files(tokenizer: Any, checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("mixtral")
    label = tokenizer_label(folder, tokenizer)
    assert label.startswith(f"{type(tokenizer).__name__} sha256:")
    kept = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(kept + " ")
    assert tokenizer_label(folder, tokenizer) != label
    (folder / "tokenizer.json").write_text(kept)
