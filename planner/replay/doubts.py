"""Doubts about a replay: what the figures of a plan lack, a line each."""

from collections.abc import Iterator

import numpy as np

from ...profilers.origin import Environment
from ...profilers.profile import Profile
from ..evaluate.costs import ENCODING, FOLDING
from ..loaded_plan import LoadedPlan
from .steps import Stage

AGAIN = "for predicted seconds: moeplan profile on these machines, then --profile profile.json"


def doubts(
    plan: LoadedPlan, stage: Stage, ranks: Environment, *, tokens: int | None, profile: Profile | None
) -> Iterator[str]:
    """What the figures of a plan lack that ran on these ranks, in steps of so many tokens where they were asked for."""
    yield from _few_tokens(plan, stage, tokens)
    nodes, hosts = stage.scene.cluster.num_nodes, ranks.num_hosts
    if hosts < nodes:
        yield f"{nodes} nodes run on {_hosts(hosts)}: what is sent between them here crosses no link of the cluster"
    if profile is None:
        yield AGAIN
        return
    yield from _other_hardware(profile, ranks)
    assert stage.scene.costs is not None
    missing, noisy = stage.scene.costs.missing, stage.scene.costs.noisy
    parts = _timed_parts(plan)
    yield from (f"no predicted seconds of {what}: {missing[name]}" for name, what in parts.items() if name in missing)
    if listed := ", ".join(what for name, what in parts.items() if name in noisy):
        yield f"predicted by curves of a NOISY machine: {listed}; profile again when it is quiet"


def _few_tokens(plan: LoadedPlan, stage: Stage, wanted: int | None) -> Iterator[str]:
    """A step of fewer tokens than were asked for; where no number was, of less than half of those the plan is for."""
    run, evaluation = int(np.bincount(stage.recorded.step).max()), plan.plan.evaluation
    judged = 0.0 if evaluation is None or "step" in stage.source.known else evaluation.judging.tokens_per_step
    if wanted is not None and run < wanted:
        rest = "samples" if stage.seen else "samples that no plan was fitted to"
        yield f"a step has {run:,} of the {wanted:,} tokens asked for: no more {rest}; record more"
    if wanted is None and 2 * run < judged:
        yield f"a step has {run:,} tokens, {plan.path} is for {judged:,.0f}: --tokens-per-step {judged:.0f}"


def _timed_parts(plan: LoadedPlan) -> dict[str, str]:
    """Parts of the layers whose seconds are predicted where curves are known, as the cost model names them."""
    decisions, parts = plan.plan.decisions, {"experts": "experts", "dispatch": "exchanges"}
    if plan.plan.dispatch_model == "coherent":
        parts["kv"] = "gathering K and V"
    if decisions.wire:
        parts[ENCODING] = "encoding rows"
    if decisions.condensation is not None:
        parts[FOLDING] = "finding and folding rows that stand for others"
    return parts


def _other_hardware(profile: Profile, ranks: Environment) -> Iterator[str]:
    """What a profile is of, where none of it was measured on the hardware of the ranks."""
    first, *_ = profile.origins
    measured = [origin.environment for origin in profile.origins if origin.environment is not None]
    if (ranks.device, ranks.num_hosts) in {(one.device, one.num_hosts) for one in measured}:
        return
    machines = [f"{one.device} ({_hosts(one.num_hosts)})" for one in (*measured, ranks)]
    described = f"{(first.name or 'a cluster').split(':')[0]} ({first.kind}, not measured)"
    of = " and ".join(dict.fromkeys(machines[:-1])) or described
    yield f"predicted for other hardware: the profile is of {of}; these ranks run on {machines[-1]}"


def _hosts(number: int) -> str:
    return f"{number} host{'s' * (number > 1)}"
