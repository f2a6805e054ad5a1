"""What `solve` and `show` print of a plan."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ...runtime.plan import Part, Plan
from ...solvers.outcome import Objective, Outcome
from ...solvers.placement import Placement
from ..balance.report import balance_lines, print_redundancy
from ..netmoe.report import sample_policy_lines
from ..options import Search, parsed
from ..pipeline.report import degree_lines, degree_summary
from ..tables.contenders import contender_table, legend
from ..tables.seconds import TimeUnit, print_seconds
from .picture import placement_picture
from .remarks import remarks, stays_in_force

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["show_report", "solve_report"]


def solve_report(plan: Plan, path: Path, console: "Console") -> None:
    """What was read, what was done with its bound, held-out figures beside baselines, what it costs, what is next."""
    _print_inputs(plan, console)
    _print_outcomes(plan, console)
    _print_evaluation(plan, console)
    pays = (plan.verdict is None or plan.verdict.value == "benefit") and not stays_in_force(plan)
    console.print(f"wrote     {path}" + (f"    next: moeplan apply {path}" if pays else ""))


def show_report(plan: Plan, path: Path, console: "Console") -> None:
    """The plan on a screen: origin, outcome, tables, and a picture of its placement."""
    console.print(
        f"plan      {path}  {', '.join(plan.strategies)}  {plan.plan_sha256[:12]}  {plan.created_at:%Y-%m-%d}"
    )
    _print_inputs(plan, console)
    _print_outcomes(plan, console)
    _print_evaluation(plan, console)
    for line in placement_picture(plan, console.width):
        console.print(line)
    if plan.decisions.pipeline is not None:
        for line in degree_lines(plan, console.width):
            console.print(line)


def _print_inputs(plan: Plan, console: "Console") -> None:
    model, source = plan.model, plan.inputs.trace
    slots = "" if (placed := plan.placement) is None else _slots(placed)
    console.print(
        f"model     {model.name}: {model.num_layers} MoE layers x {model.num_experts} experts, top-{model.top_k};"
        f" cluster {plan.cluster}{slots}"
    )
    if source is not None and plan.evaluation is not None:
        unit = plan.options.get("evaluation", {}).get("unit", "sample")
        fit, held_out = (_members(found, unit) for found in (plan.evaluation.fit, plan.evaluation.held_out))
        split = f"{unit}s: fit {fit}, {f'held out {held_out}' if held_out else 'nothing held out'}"
        others = len(plan.options.get("placement", {}).get("mixture") or ()) - 1
        told = f" of the first, and {others} trace{'s' * (others > 1)} more" if others > 0 else ""
        console.print(f"trace     {source.path}  {source.num_tokens:,} tokens{told}; {split}")


def _members(part: Part | None, unit: str) -> str:
    """How many units a part has; of whole steps, their samples beside."""
    if part is None:
        return ""
    if unit == "step" and part.num_samples > part.num_steps:
        return f"{part.num_steps:,} of {part.num_samples:,} samples"
    return f"{part.num_samples:,}"


def _slots(placement: Placement) -> str:
    """What the slots are, where they are more than one an expert."""
    if not placement.has_replicas:
        return ""
    extra = placement.num_slots - placement.num_experts
    more = extra / placement.num_experts
    return f", {placement.num_slots} slots a layer: {extra} replicas, {more:.0%} more expert memory"


def _print_outcomes(plan: Plan, console: "Console") -> None:
    for name, outcome in plan.outcome.items():
        what = f"{name} " if len(plan.outcome) > 1 else ""
        console.print(f"solved    {what}{outcome.wall_s:.1f} s, {outcome.status}: {_objective(plan, outcome)}")
        if outcome.compiled_s >= 0.1:
            console.print(f"compiled  {outcome.compiled_s:.1f} s, before that")
        if name == "placement":
            for line in _search_lines(plan, outcome):
                console.print(line)
    if plan.decisions.pipeline is not None:
        console.print(f"degrees   {degree_summary(plan)}")


def _named(plan: Plan, objective: Objective) -> tuple[str, str]:
    """What an objective is, in words, and the form of its figures."""
    words, form = _OBJECTIVES.get(objective.name, (objective.name, ".3f"))
    if (percent := objective.name.removeprefix("step_balance_p")) != objective.name:
        words = f"busiest device over the mean, {percent} % of the fitted steps within,"
    also = " and the first before" if plan.dispatch_model == "coherent" else ""
    return words.replace("a token's experts", f"a token's experts{also}"), form


def _objective(plan: Plan, outcome: Outcome) -> str:
    """The objective's value on the fitted samples, its bound and its kind."""
    objective = outcome.objective
    words, form = _named(plan, objective)
    timed = TimeUnit.up_to(max(objective.value, outcome.bound or 0.0)) if objective.name == "exchange_s" else None
    shown = (lambda x: f"{timed.text(x)} {timed.name}") if timed else f"{{:{form}}}".format
    value = f"{words} {shown(objective.value)}"
    if outcome.bound is None or outcome.gap is None:
        return f"{value} (no bound)"
    limit = "at most" if objective.sense == "max" else "at least"
    return f"{value} of {limit} {shown(outcome.bound)} ({outcome.bound_kind} bound, gap {outcome.gap:.1%})"


def _search_lines(plan: Plan, outcome: Outcome) -> Iterable[str]:
    """The hops after each stage of exflow's search, and what its cap costs."""
    found = plan.options.get("placement", {}).get("search")
    if found is None:
        return
    search = parsed(Search, found, "placement.search")
    for level, reason in search.simple.items():
        yield f"bounded   no thorough bound of what stays on a {level}: {reason}"
    what = "pairs apart" if "affinity" in outcome.objective.name else "hops"
    for stage in search.stages:
        yield f"{stage.name:<9} {stage.inter_hops:.1%} {what} between nodes, {stage.intra_hops:.1%} inside them"
    if (cap := search.cap) is not None:
        words, form = _named(plan, outcome.objective)
        without = f"{words} {cap.objective_without:{form}}"
        yield (
            f"capped    at {cap.max_load:g} of a layer's mean load a device; without, in less time, {without} with up"
            f" to {cap.highest_without:.3g}"
        )


def _print_evaluation(plan: Plan, console: "Console") -> None:
    if plan.evaluation is None:
        return
    part = plan.evaluation.judging
    title = "held out" if plan.evaluation.held_out else "fitted"
    console.print()
    if not plan.judges_pipeline:  # whose contenders differ in seconds alone
        several_nodes = plan.cluster.num_nodes > 1
        console.print(contender_table(part, title, several_nodes=several_nodes))
        console.print(legend(part, several_nodes=several_nodes))
        console.print()
    if "seconds" in plan.options:
        print_seconds(plan, part, console)
        console.print()
    if plan.decisions.sample_policy is not None:
        for line in sample_policy_lines(plan, part):
            console.print(line)
    print_redundancy(plan, console)
    for line in (*remarks(plan, part), *balance_lines(plan, part)):
        console.print(line)


_OBJECTIVES = {
    "link_cost": ("a re-homing costs, in copies inside a node,", ",.1f"),
    "exchange_s": ("the exchanges of a layer take", ".3g"),
    "busiest_cost": ("the busiest port carries, in copies inside a node,", ".1f"),
    "moe_s": ("MoE layers take, in seconds a step,", ".4g"),
    "balance": ("busiest device over the mean, of all fitted loads together,", ".4f"),
    "step_balance": ("busiest device over the mean, mean over the fitted steps,", ".4f"),
    "hops_kept": ("hops kept", ".1%"),
    "hop_cost": ("a transition costs, in hops inside a node,", ".3f"),
    "affinity_kept": ("pairs of a token's experts kept on one device", ".1%"),
    "affinity_cost": ("a pair of a token's experts is apart, in hops inside a node,", ".3f"),
    "expected_affinity_kept": ("pairs of a token's experts kept on one device, counting replicas,", ".1%"),
    "expected_affinity_cost": (
        "a pair of a token's experts is apart, counting replicas, in hops inside a node,",
        ".3f",
    ),
    "expected_hops_kept": ("hops kept, as expected with replicas,", ".1%"),
    "expected_hop_cost": ("a transition costs, as expected with replicas, in hops inside a node,", ".3f"),
}
