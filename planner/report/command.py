"""The command that makes a plan again."""

import shlex
from dataclasses import fields
from pathlib import Path

from ...errors import MoeplanError
from ...profilers.profile import Profile
from ...runtime.plan import Plan
from ..certify.recounted import task_of
from ..params import Params, flags_of, option_of
from ..strategies.placement_options import PlacementOptions
from ..strategies.registry import chosen_by, decided_by


def made_by(plan: Plan, profile: Profile | None) -> str:
    """The command that makes a plan again, as far as the plan says what was asked for."""
    source, file, base = plan.inputs.trace, plan.inputs.profile, plan.inputs.base
    strategies = decided_by(plan)
    if source is None or not strategies:
        return "no command: the plan names no trace, or no strategy"
    timed_by = None if file is None or file.path is None else Path(file.path)
    try:
        request = task_of(plan, strategies[-1], source.path, timed_by).request
    except MoeplanError as error:
        return f"no command: {error}"
    words = ["moeplan", "solve"]
    if not (chosen := chosen_by(plan)):
        words += ["--strategy", request.strategy, *_asked(plan, request.params)]
    elif engine := plan.options[chosen[0].name].get("engine"):
        words += ["--engine", engine]
    members = PlacementOptions.of(plan).mixture if "placement" in plan.options else ()
    for one in [f"{member.path}:{member.weight!r}" for member in members] or [source.path]:
        words += ["--trace", one]
    words += [] if timed_by is None else ["--profile", str(timed_by)]
    if base is None or base.path is None:
        words += ["--cluster", str(plan.cluster)]
        known = {} if profile is None else profile.cluster.links_on(plan.cluster)
        for kind, link in plan.cluster.links.items():
            if known.get(kind) != link:
                kept = known[kind].shared_by if kind in known else 1.0
                shared = f":{link.shared_by:.12g}" if link.shared_by != kept else ""
                words += ["--link", f"{kind}={1e-9 / link.s_per_byte:.12g}:{link.latency_s * 1e6:.12g}{shared}"]
    else:
        words += ["--on", base.path]
    words += ["--dispatch", plan.dispatch_model] * (
        not chosen and plan.dispatch_model != strategies[-1].dispatch_models[0]
    )
    words += ["--wire", request.wire] if request.wire else []
    words += ["--waterfill"] * request.waterfill
    words += [word for phase in request.phases for word in ("--phase", phase)]
    words += ["--fit-fraction", repr(request.fit_fraction), "--seed", str(plan.seed)]
    words += ["--for", request.purpose] if request.purpose else []
    words += [request.size.flag, str(request.size.number)] if request.size else []
    return shlex.join(words)


def _asked(plan: Plan, params: Params) -> list[str]:
    """Flags of a strategy's parameters that are not the usual ones."""
    usual, words = {one.name: one.default for one in fields(params)}, list[str]()
    for name, one in flags_of(type(params)):
        value, option = getattr(params, name), option_of(name, one)
        if value == usual[name]:
            continue
        sign = next((sign for sign in "@:" if sign in (one.metavar or "")), " ")
        for each in value if one.repeats else [value]:
            text = sign.join(map(str, each)) if isinstance(each, tuple) else str(each)
            words += [option] if each is True else [option, text]
    placement, weighed = plan.placement, PlacementOptions.of(plan).redundancy if "placement" in plan.options else None
    if weighed is not None:
        words += ["--redundant", "auto"]
    elif placement is not None and placement.has_replicas and plan.decisions.rebalancing is None:
        words += ["--redundant", str(placement.num_slots - placement.num_experts)] * ("redundant" in usual)
    return words
