"""The document of a plan: the answer, one table, all doubts and few other remarks; the rest for who asks for it.

Legend: E experts; D devices.
"""

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console

from ...runtime.plan import Part, Plan
from ...solvers.outcome import Outcome
from ...solvers.placement import Placement
from ..document import Section, Text, to_console
from ..evaluate.metrics import METRICS
from ..evaluate.price import STEP
from ..figures import TimeUnit, contender_table, link_text, percent
from ..options import EvaluationOptions, SecondsOptions
from ..replay.report import replayed_sections
from ..strategies.registry import chosen_by, decided_by
from ..strategies.strategy import Strategy
from .answer import answer
from .next_step import after_solve
from .remarks import doubts, judged_sections, remarks

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
SECONDS = [spec.name for spec in METRICS.values() if spec.unit == "seconds"]


def solve_report(plan: Plan, path: Path, console: Console, *, replaced: bool = False, verbose: bool = False) -> None:
    """Print a plan that was just solved, its file, which may have `replaced` another, and the next command."""
    earlier = ", replacing an earlier file" if replaced else ""
    wrote = Text.of(f"wrote {path}{earlier}    next: {after_solve(plan, path)}")
    to_console([*plan_sections(plan, console.width), Section("", (wrote,))], console, verbose=verbose)


def show_report(plan: Plan, path: Path, console: Console, *, verbose: bool = False) -> None:
    """Print a plan from a file."""
    named = f"{path}  {', '.join(plan.strategies)}  {plan.plan_sha256[:12]}  {plan.created_at:%Y-%m-%d}"
    sections = [Section("", (Text.of(named),)), *plan_sections(plan, console.width), *replayed_sections(plan, path)]
    to_console(sections, console, verbose=verbose)


def plan_sections(plan: Plan, width: int = 100) -> list[Section]:
    """The document of a plan."""
    strategies = strategies_of(plan)
    sections = [Section("Answer", (Text.of(answer(plan), about(plan)),))]
    if plan.evaluation is not None and plan.verdict is not None:
        part, counted = plan.evaluation.judging, [name for name in METRICS if name not in SECONDS]
        table = next(filter(None, (one.table(plan, part) for one in strategies)), None)
        sections += judged_sections(
            part, plan.verdict, [*doubts(plan, part)], [*remarks(plan, part, strategies)], counted, table=table
        )
        sections += _seconds(plan, part, plan.verdict.against)
    sections.append(Section("How it was solved", (Text(tuple(_solved(plan))),), verbose=True))
    for one in strategies:
        sections += one.sections(plan, width)
    if plan.placement is not None and not plan.placement.has_replicas:
        picture = tuple(_placement_picture(plan.placement, width))
        sections.append(Section("Where experts live", (Text(picture),), verbose=True))
    return sections


def strategies_of(plan: Plan) -> list[Strategy]:
    """Strategies that decided the plan: first those that chose among others, then the rest, the last first."""
    return [*reversed(chosen_by(plan)), *reversed(decided_by(plan))]


def about(plan: Plan) -> str:
    """Strategies, dispatch, model and cluster of a plan, with the links that time its exchanges."""
    model, wire = plan.model, f", {plan.decisions.wire} rows" if plan.decisions.wire else ""
    sources = SecondsOptions.of(plan).sources if SecondsOptions.key in plan.options else {}
    timed = {source for part, source in sources.items() if part.startswith("dispatch")}
    links = [f"{kind} {link_text(link)}" for kind, link in plan.cluster.links.items() if f"link {kind}" in timed]
    return (
        f"{' + '.join(plan.strategies)}, {plan.dispatch_model} dispatch{wire}; {model.name}: {model.num_layers} MoE"
        f" layers x {model.num_experts} experts, top-{model.top_k}; cluster {plan.cluster}"
        f"{', links: ' * bool(links)}{'; '.join(links)}"
    )


def _seconds(plan: Plan, part: Part, today: str) -> Iterator[Section]:
    """Seconds of the parts of a step of every contender, and their sources."""
    if "seconds" not in plan.options:
        return
    options = SecondsOptions.of(plan)
    table = contender_table(part, [STEP, *(name for name in SECONDS if name != STEP)], today=today, ranged=True)
    lines = (
        "the busiest rank and port of each layer, mean over steps; intervals hold the fits' error and, over several"
        " steps, theirs",
        *(f"{part_name} by {source}" for part_name, source in options.sources.items()),
    )
    yield Section("Predicted seconds of a step", (table, Text(lines)), verbose=True)


def _solved(plan: Plan) -> Iterator[str]:
    """The trace, the solver's objective, and its bound."""
    source, evaluation = plan.inputs.trace, plan.evaluation
    if source is not None and evaluation is not None:
        unit = EvaluationOptions.of(plan).unit
        fit, held_out = (one and members(one, unit) for one in (evaluation.fit, evaluation.held_out))
        split = f"{unit}s: fit {fit}, {f'held out {held_out}' if held_out else 'nothing held out'}"
        others = len(plan.options.get("placement", {}).get("mixture") or ()) - 1
        mixed = f" of the first, and {others} trace{'s' * (others > 1)} more" if others > 0 else ""
        yield f"trace     {source.path}  {source.num_tokens:,} tokens{mixed}; {split}"
    words = {name: row for one in decided_by(plan) for name, row in one.objectives.items()}
    for name, outcome in plan.outcome.items():
        yield f"{name}: {outcome.wall_s:.1f} s, {outcome.status}: {_objective(outcome, words)}"
        if outcome.compiled_s >= 0.1:
            yield f"compiled for {outcome.compiled_s:.1f} s before that"


def members(part: Part, unit: str) -> str:
    """Number of units in a part; of whole steps, their samples beside."""
    if unit == "step" and part.num_samples > part.num_steps:
        return f"{part.num_steps:,} of {part.num_samples:,} samples"
    return f"{part.num_samples:,}"


def _objective(outcome: Outcome, objectives: Mapping[str, tuple[str, str]]) -> str:
    """The objective's value on the fitted samples, its bound and its kind; without words it goes by its name."""
    name = outcome.objective.name
    stem = name.rstrip("0123456789.")
    words, form = objectives.get(stem, (name, ".3f"))
    timed = TimeUnit.up_to(max(outcome.objective.value, outcome.bound or 0.0)) if form == "s" else None

    def shown(number: float) -> str:
        if form == "%":
            return percent(number, 1)
        return f"{timed.text(number)} {timed.name}" if timed else f"{number:{form}}"

    reached = f"{words.replace('{}', name.removeprefix(stem))} {shown(outcome.objective.value)}"
    if outcome.bound is None or outcome.gap is None:
        return f"{reached} (no bound)"
    limit = "at most" if outcome.objective.sense == "max" else "at least"
    return f"{reached} of {limit} {shown(outcome.bound)} ({outcome.bound_kind} bound, gap {percent(outcome.gap, 1)})"


def _placement_picture(placement: Placement, width: int) -> Iterator[str]:
    """Map of the experts, each of which has one device: a sign per expert."""
    yield f"column = expert, sign = device ({placement.num_devices} devices)"
    for layer in range(placement.num_layers):
        text = "".join(DIGITS[device % len(DIGITS)] for device in placement.holds(layer).argmax(axis=1).tolist())
        label, below, columns = f"{f'layer {layer}':<12}", " " * 12, max(width, 28)
        yield from textwrap.wrap(text, columns, initial_indent=label, subsequent_indent=below, break_on_hyphens=False)
