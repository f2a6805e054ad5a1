"""Facts about a recording's model: from its files, its config.json and the user, who may not contradict."""

from dataclasses import asdict, fields
from typing import Any

from pydantic import BaseModel

from ...errors import InputError, MismatchError, UsageError
from ...files import canonical_json, validated
from ..model import Attention, ModelSpec
from .hidden_layers import spans
from .source import Source

Facts = dict[str, Any]
ATTENTION = tuple(field.name for field in fields(Attention))


class _Model(BaseModel):
    """A model, for pydantic to check what a file says of it."""

    model: ModelSpec


def model_of(source: Source, config: ModelSpec | None, asked: Facts, name: str) -> ModelSpec:
    """The model of a recording.

    Parameters
    ----------
    config
        Of its config.json, where there is one.
    asked
        Facts asked for, by the names of `ModelSpec`, and `kv_size`; None where nothing was.
    name
        The model's where nothing says one.

    Raises
    ------
    InputError
        Nothing is routed.
    MismatchError
        The recording and config.json are not of one model.
    UsageError
        Facts asked for are not those of the files.
    """
    facts = _flat(dict(source.model))
    for key, value in (_flat(asdict(config)) if config else {}).items():
        facts[key] = _agreed(key, facts.get(key), value)
    for key, value in asked.items():
        said = facts.get(key)
        if key != "name" and None not in (value, said) and said != value:
            raise UsageError(f"{key} {value} asked for; the file says {said}")
        facts[key] = said if value is None else value
    if facts["num_experts"] is None:
        facts["num_experts"] = source.largest_id() + 1
        if not facts["num_experts"]:
            raise InputError("no token is routed: every expert id is -1")
        guess = f"{facts['num_experts']} taken, the largest id + 1"
        source.notes.append(f"the file does not say how many experts there are: {guess}; give --num-experts")
    if facts["top_k"] is None:
        facts["top_k"] = 1
        source.notes.append("the file does not say how many experts a token goes to: 1 taken; give --top-k")
    facts["attention"] = {key: facts.pop(key) for key in ATTENTION if key in facts}
    facts["name"] = facts["name"] or name
    return validated(_Model, canonical_json({"model": facts}), source="model", what="a model").model


def _flat(facts: Facts) -> Facts:
    """The facts with those of the attention among them."""
    attention: Facts = facts.pop("attention", {})
    return facts | attention


def _agreed(key: str, recorded: Any, said: Any) -> Any:
    """Value on which the files and config.json agree, or the one that either gives."""
    if recorded is None or said is None or key == "name":
        return said if recorded is None else recorded
    if key == "layer_ids":
        if tuple(recorded) not in (tuple(said), tuple(range(len(said)))):
            raise MismatchError(f"layers {spans(recorded)} recorded; config.json has experts in {spans(said)}")
    elif recorded != said:
        raise MismatchError(f"{key} {recorded} recorded; config.json says {said}: give that of the model")
    return said
