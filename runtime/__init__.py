"""The plan and its execution in a training or inference loop; importing this loads nothing heavy."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .active import load_plan
    from .gradients import clip_grad_norm_, expert_parameters
    from .parallel import parallelize
    from .schedule import schedule_of
    from .trainer import PlanCallback
    from .whole import full_state_dict

__all__ = [
    "PlanCallback",
    "clip_grad_norm_",
    "expert_parameters",
    "full_state_dict",
    "load_plan",
    "parallelize",
    "schedule_of",
]

_HOMES = {
    "PlanCallback": ".trainer",
    "clip_grad_norm_": ".gradients",
    "expert_parameters": ".gradients",
    "full_state_dict": ".whole",
    "load_plan": ".active",
    "parallelize": ".parallel",
    "schedule_of": ".schedule",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name], __name__), name)
