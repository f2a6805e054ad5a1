"""The part of a plan that engines carry: a placement of equal devices, for tokens that return to their home rank."""

import math
from dataclasses import replace

from ...errors import MismatchError, UsageError
from ...solvers.placement import Placement
from ...traces.model import ModelSpec
from ..plan import Plan


def placed(plan: Plan, engine: str) -> Placement:
    """The placement of a plan, if every device has as many slots and tokens travel as they do in an engine.

    Raises
    ------
    UsageError
        The plan is of another kind.
    """
    placement = plan.placement
    if placement is None:
        raise UsageError(
            f"{engine} takes a placement, and the plan decides {' and '.join(plan.decisions.names) or 'nothing'};"
            " make one with moeplan solve --strategy eplb"
        )
    if plan.decisions.sample_policy is not None:
        raise UsageError(
            f"the plan moves samples between ranks (sample_policy), and {engine} cannot; make one with moeplan solve"
            " --strategy eplb"
        )
    if plan.decisions.condensation is not None:
        raise UsageError(
            f"the plan lets rows stand for others (condensation), and {engine} cannot; make one with moeplan solve"
            " --strategy eplb"
        )
    if plan.dispatch_model != "standard":
        raise UsageError(
            f"the plan was made for {plan.dispatch_model} dispatch, and in {engine} every token returns to its home"
            " rank after each layer, where it would not give what it promises; solve again with --dispatch standard"
        )
    _check_slots(placement, engine)
    return placement


def described(plan: Plan, config: ModelSpec | None) -> ModelSpec:
    """The plan's model with its layers among the hidden ones, where `config` (of a config.json) says more of them.

    Raises
    ------
    MismatchError
        The two are not the same model.
    """
    model = plan.model
    if config is None:
        return model
    ordinals = model.layer_ids == tuple(range(model.num_layers))
    main = tuple(layer for layer in model.layer_ids if layer < (config.num_hidden_layers or 0))
    layer_ids = model.layer_ids if main == config.layer_ids else config.layer_ids
    if model.num_experts != config.num_experts or not (
        main == config.layer_ids or (ordinals and model.num_layers == config.num_layers)
    ):
        raise MismatchError(
            f"the plan places {model.num_experts} experts in {model.num_layers} layers ({_span(model.layer_ids)}); the"
            f" config.json has {config.num_experts} in {config.num_layers} ({_span(config.layer_ids)}): give the one"
            " of the plan's model"
        )
    if None not in (model.hidden_size, config.hidden_size) and model.hidden_size != config.hidden_size:
        raise MismatchError(
            f"the plan's model has hidden size {model.hidden_size}, config.json says {config.hidden_size}: give the one"
            " of the plan's model"
        )
    return replace(
        model,
        layer_ids=layer_ids,
        num_hidden_layers=config.num_hidden_layers,
        num_mtp_layers=config.num_mtp_layers or 0,
    )


def num_hidden_layers(model: ModelSpec, engine: str) -> int:
    """Number of hidden layers of a model; a UsageError where it is not known."""
    if model.num_hidden_layers is None:
        raise UsageError(
            f"{engine} counts hidden layers, dense ones too, and the plan does not say how many {model.name!r} has;"
            " give the model's --hf-config config.json"
        )
    return model.num_hidden_layers


def rows_by_hidden_layer(placement: Placement, model: ModelSpec) -> dict[int, list[int]]:
    """The expert in every slot, by the hidden layer of each row."""
    return dict(zip(model.layer_ids, placement.physical_to_logical.tolist(), strict=True))


def main_rows(placement: Placement, model: ModelSpec) -> list[list[int]]:
    """The expert in every slot of the MoE layers, in their order, without those of MTP that a plan may hold."""
    rows = rows_by_hidden_layer(placement, model)
    return [row for layer, row in rows.items() if layer < (model.num_hidden_layers or math.inf)]


def contiguous(num_slots: int, num_experts: int) -> list[int]:
    """A row for a layer that nothing was planned for: expert i mod E in slot i, on no device twice."""
    return [slot % num_experts for slot in range(num_slots)]


def _check_slots(placement: Placement, engine: str) -> None:
    slots = placement.slots.tolist()
    if 0 in slots:
        raise UsageError(
            f"device {slots.index(0)} of the plan has no slots (a dead device), and {engine} gives all devices as many;"
            " solve for a cluster without it"
        )
    if len(set(slots)) > 1:
        raise UsageError(
            f"devices of the plan have {min(slots)} to {max(slots)} slots, and {engine} gives all as many; solve again"
            f" with --slots {max(slots)}"
        )


def _span(layer_ids: tuple[int, ...]) -> str:
    return f"{layer_ids[0]} to {layer_ids[-1]}"
