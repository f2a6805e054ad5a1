"""Hidden layers of a recording that are MoE layers.

Engines record dense layers as rows of zeros, which look like tokens that all go to expert 0, and number some layers
beyond the hidden ones. The model's config.json tells them apart; without one nothing is guessed of tokens.

Legend: H hidden layers.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError, MismatchError
from ..model import ModelSpec


@dataclass(frozen=True, slots=True)
class Layers:
    """The MoE layers as a recording names them and as the model has them, and what is to be said of others."""

    recorded: tuple[int, ...]
    ids: tuple[int, ...]
    notes: tuple[str, ...]


def with_experts(num_rows: int, model: ModelSpec | None) -> list[int]:
    """The MoE layers of a recording with a row a hidden layer: all, where nothing says more.

    Raises MismatchError where the model has another number of hidden layers.
    """
    if model is None:
        return list(range(num_rows))
    if num_rows != model.num_hidden_layers:
        raise MismatchError(
            f"{num_rows} layers recorded; config.json has {model.num_hidden_layers} hidden layers: give that of this"
            " model"
        )
    return list(model.layer_ids)


def counted_layers(filled_H: NDArray[np.bool_], model: ModelSpec | None) -> tuple[list[int], list[str]]:
    """The MoE layers of counts with a row a hidden layer, and what is to be said of the others.

    `filled_H` says whether a layer counts anything: of experts each layer does, so that the others are dense.
    """
    if model is not None:
        layers = with_experts(len(filled_H), model)
        check_routed(filled_H, model)
        return layers, []
    if not filled_H.any():
        raise InputError("nothing is counted in any layer; expected a recording of requests")
    layers, empty = _ids(filled_H), _ids(~filled_H)
    note = f"hidden layers {spans(empty)} count nothing: taken for dense and left out (--hf-config checks that)"
    return layers, [note] if empty else []


def check_routed(filled_H: NDArray[np.bool_], model: ModelSpec | None) -> None:
    """Hold which hidden layers hold more than zeros against the model.

    Raises
    ------
    InputError
        Without a model, a layer is all zeros; with one, an MoE layer is.
    MismatchError
        A dense layer is not.
    """
    filled = _ids(filled_H)
    if model is None:
        if len(filled) < len(filled_H):
            raise InputError(
                f"hidden layers {spans(_ids(~filled_H))} are all zeros, which dense layers are and layers whose tokens"
                " all go to expert 0; give --hf-config config.json of the model"
            )
        return
    if wrong := sorted(set(filled) - set(model.layer_ids)):
        raise MismatchError(f"hidden layers {spans(wrong)} were routed; config.json has no experts there")
    if silent := sorted(set(model.layer_ids) - set(filled)):
        raise InputError(
            f"hidden layers {spans(silent)} have experts by config.json, and nothing was recorded of them; expected all"
            " MoE layers (some kernels and pipeline stages are not recorded)"
        )


def named_layers(recorded: Collection[int], model: ModelSpec | None) -> Layers:
    """The MoE layers of a recording that names them: hidden layers, or of some recorders the ordinals of MoE layers.

    Raises MismatchError where they are not those of the model.
    """
    names = tuple(sorted(recorded))
    if model is None:
        return Layers(names, names, ())
    hidden = tuple(layer for layer in names if layer < (model.num_hidden_layers or 0))
    if hidden not in (model.layer_ids, tuple(range(len(model.layer_ids)))):
        raise MismatchError(
            f"layers {spans(names) or 'none'} recorded; config.json has experts in {spans(model.layer_ids)}: expected"
            " all MoE layers of that model, numbered from 0 as there (pipeline stages may count from 0 each)"
        )
    notes = []
    if len(names) > len(hidden):
        notes.append(f"layers {spans(names[len(hidden) :])} left out: beyond the hidden layers (MTP)")
    if hidden != model.layer_ids:
        notes.append(f"layers {spans(hidden)} taken as the MoE layers {spans(model.layer_ids)}")
    return Layers(hidden, model.layer_ids, tuple(notes))


def spans(ids: Sequence[int]) -> str:
    """Ascending ids as text: "0-2, 7"."""
    pieces: list[list[int]] = []
    for index in ids:
        if pieces and index == pieces[-1][1] + 1:
            pieces[-1][1] = index
        else:
            pieces.append([index, index])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in pieces[:4])
    return text + (", ..." if len(pieces) > 4 else "")


def _ids(chosen_H: NDArray[np.bool_]) -> list[int]:
    return np.flatnonzero(chosen_H).tolist()
