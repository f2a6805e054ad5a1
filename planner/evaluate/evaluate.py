"""The figures of contenders on the parts of a trace, and the verdict on the first of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import numpy as np

from ...errors import InputError, UsageError
from ...runtime.plan import Contender as Row
from ...runtime.plan import Evaluation, Part, Verdict
from ...solvers.arrays import Floats
from ..options import SecondsOptions
from .chunks import capacity
from .cohort import Cohort
from .costs import ENCODING, FOLDING
from .homes import Homes, stay
from .journey import TODAY, Contender, Journey
from .metrics import ATTENTION, Figures, figures_of
from .price import STEP, Seconds, cuts_of, price
from .replay import Replay
from .replay import replay as fast_replay
from .scene import Scene
from .sums import Context, Drawn, dropped_share, mean_ratio
from .tally import Tally

DRAWN_CELLS = 2**23  # of 8 bytes, of steps that are drawn at a time
MOST_DEVICES = 512  # of a matrix of all pairs
MATTERS: Final = 0.01  # of what there is: less of it is no benefit, however sure


@dataclass(frozen=True, slots=True)
class Evaluated:
    """An evaluation as the plan stores it, with the samples and homes behind it."""

    evaluation: Evaluation
    judged: Mapping[str, Figures]  #: The figures of the contenders on the part that judges, by label
    seconds: SecondsOptions | None  #: How seconds were predicted; None without
    #: Where samples were re-homed, by label and part
    homes: Mapping[str, Sequence[Homes]] = field(default_factory=dict)
    #: Tallies of the part that judges, of the first scene, by label; none unless they are kept
    tallies: Mapping[str, Tally] = field(default_factory=dict)


def evaluate(
    scenes: Scene | Sequence[tuple[float, Scene]],
    contenders: Sequence[Contender],
    *,
    aside: Sequence[Contender] = (),
    replay: Replay = fast_replay,
    keep: bool = False,
) -> Evaluated:
    """Judge contenders, the plan first.

    Of several scenes with weights, which sum to 1, figures are weighted means. Those `aside` are judged, too, but no
    part of the evaluation; `keep` keeps tallies, with the copies of every pair of devices where these are not too many.
    UsageError where the trace, or a journey, is none to judge these by; InputError where no token of a part is routed.
    """
    weighted = [(1.0, scenes)] if isinstance(scenes, Scene) else list(scenes)
    every = [*contenders, *aside]
    labels = [contender.label for contender in every]
    if twice := {label for label in labels if labels.count(label) > 1}:
        raise UsageError(f"{min(twice)}: two contenders of one name; rename the plan's file")
    between = keep and weighted[0][1].cluster.num_devices <= MOST_DEVICES
    homes, contexts = zip(*(_judged(scene, every, replay, between=between) for _, scene in weighted), strict=True)
    parts, figures = list[Part](), list[dict[str, Figures]]()
    for number, of_scenes in enumerate(zip(*contexts, strict=True)):
        rows = [
            [(weight, one) for one in figures_of(of_scene, seed=scene.seed)]
            for (weight, scene), of_scene in zip(weighted, of_scenes, strict=True)
        ]
        figures.append(dict(zip(labels, map(Figures.weighted, zip(*rows, strict=True)), strict=True)))
        cohorts = [(weight, scene.cohorts[number]) for weight, scene in weighted]
        parts.append(_part(cohorts, contenders, figures[-1]))
    judging = [of_parts[-1] for of_parts in contexts]
    tallies = {label: context.tally for label, context in zip(labels, judging[0], strict=True)}
    return Evaluated(
        Evaluation(fit=parts[0], held_out=parts[1] if len(parts) > 1 else None),
        figures[-1],
        _seconds_options(weighted[0][1], [context for row in judging for context in row[: len(contenders)]]),
        homes[0],
        tallies if keep else {},
    )


def verdict(
    evaluated: Evaluated, metric: str, *, against: str = TODAY, of: str | None = None, at_least: float = 0.0
) -> Verdict:
    """Verdict whether a contender has less than another, with a paired interval.

    Parameters
    ----------
    metric
        Metric to judge by where their `step_s` cannot be compared.
    of
        Its label; None: the first.
    at_least
        The share of the other's value that a gain must be above to pay for what the metric does not hold; a step with
        its attention holds all.
    """
    plan, base = evaluated.judged[of or next(iter(evaluated.judged))], evaluated.judged[against]
    metric = STEP if plan.step_compares(base) else metric
    gain, share = plan.gain(metric, base), plan.share(metric, base)
    if metric == STEP and ATTENTION in base.summands:
        at_least = 0.0
    pays = gain.low is not None and gain.low > at_least * base.value[metric]
    pays = pays and share is not None and share.value >= MATTERS
    value: Literal["benefit", "none"] = "benefit" if pays else "none"
    return Verdict(value=value, metric=metric, against=against, gain=gain, at_least=at_least, share=share)


def _judged(
    scene: Scene, contenders: Sequence[Contender], replay: Replay, *, between: bool
) -> tuple[dict[str, list[Homes]], list[list[Context]]]:
    """The homes of samples by label and part, and every contender by part."""
    journeys, homes = _moving(scene, contenders)
    fixed = any(journey.capacity_factor is not None for journey in journeys)
    tallies = replay(scene, journeys, ports=fixed or scene.costs is not None, between=between)
    contexts = [
        [
            Context(
                tally,
                price(tally, journey, scene),
                journey.dispatch_model,
                scene.model,
                cohort.tokens_per_step,
                _dropped(scene, one.name, journey, tally),
                scene.record_steps,
                _drawn(scene, journey, cohort, tally),
                journey.wire,
            )
            for one, journey, tally in zip(contenders, journeys, row, strict=True)
        ]
        for cohort, row in zip(scene.cohorts, tallies, strict=True)
    ]
    return homes, contexts


def _drawn(scene: Scene, journey: Journey, cohort: Cohort, tally: Tally) -> Drawn | None:
    """Steps drawn from the blocks of a cohort; None where its own are resampled.

    Notes
    -----
    Cost: R M N multiplications of R draws, M blocks, whose number is bounded, and N cells of a step: layers, link
    classes and devices. It does not grow with tokens. Memory: `DRAWN_CELLS` numbers of a table at a time.
    """
    if cohort.blocks is None or tally.blocks is None or not len(draws := cohort.blocks.draws(scene.seed)):
        return None
    together = max(DRAWN_CELLS // tally.blocks.widest, 1)
    ratio, seconds = list[Floats](), list[Seconds]()
    for first in range(0, len(draws), together):
        steps = tally.blocks.mixed(draws[first : first + together])
        ratio.append(mean_ratio(steps))
        seconds.append(price(steps, journey, scene))
    return Drawn(cohort.blocks, np.concatenate(ratio), Seconds.joined(seconds))


def _dropped(scene: Scene, name: str, journey: Journey, tally: Tally) -> float | None:
    """The share of pairs that a fixed capacity drops; None without one."""
    if tally.sent is None or journey.capacity_factor is None or scene.passes is None:
        return None
    capacity_BL = capacity(tally, scene.model, journey.capacity_factor)
    if not capacity_BL[tally.loads.any(axis=2)].all():
        raise UsageError(
            f"{name}: its fixed capacity holds no row in some step of this trace, so that nothing is computed there;"
            " judge it with more --tokens-per-step, or on longer samples"
        )
    cut = cuts_of(journey, scene.passes, scene.model.num_layers).forward
    return dropped_share(tally.sent, cut.padded(capacity_BL))


def _moving(scene: Scene, contenders: Sequence[Contender]) -> tuple[list[Journey], dict[str, list[Homes]]]:
    """The journeys of contenders with the moves of all samples, and by label the homes by part that rules give."""
    journeys, homes = {one.label: one.journey for one in contenders}, dict[str, list[Homes]]()
    if (counts := scene.samples) is None:
        for label, journey in journeys.items():
            if journey.homes is not None:
                raise UsageError(f"{label}: it moves samples, which are not counted one by one here")
        return [*journeys.values()], homes
    for label, journey in journeys.items():  # counts hold all that samples that stay need
        by_place = journey.placement.has_replicas and journey.rule != "even"
        if journey.homes is None and journey.dispatch_model == "standard" and not by_place:
            journeys[label] = replace(journey, homes=stay)
    rules = {label: journey.homes for label, journey in journeys.items() if journey.homes is not None}
    counts.count({label: journeys[label].placement for label in rules})
    for label, rule in rules.items():
        placement = journeys[label].placement
        homes[label] = [rule(counts, placement, cohort) for cohort in scene.cohorts]
        moves_LI = np.zeros((placement.num_layers + 1, len(counts.index.sample)), np.int64)
        for cohort, of in zip(scene.cohorts, homes[label], strict=True):
            moves_LI[:, cohort.unit_ids] = of.device
        journeys[label] = replace(journeys[label], moves=moves_LI)
    return [*journeys.values()], homes


def _part(
    weighted: Sequence[tuple[float, Cohort]], contenders: Sequence[Contender], figures: Mapping[str, Figures]
) -> Part:
    """Part of an evaluation, as a plan stores it; InputError without any token, as counts of nothing have none."""
    cohorts = [cohort for _, cohort in weighted]
    if not any(cohort.num_tokens for cohort in cohorts):
        raise InputError("no token is routed in what was fitted, or in what judges; expected some in both: record more")
    return Part(
        num_samples=sum(len(cohort.unit_ids) for cohort in cohorts),
        num_tokens=sum(cohort.num_tokens for cohort in cohorts),
        num_steps=sum(cohort.num_steps for cohort in cohorts),
        dropped_samples=sum(cohort.dropped for cohort in cohorts),
        tokens_per_step=sum(weight * cohort.tokens_per_step for weight, cohort in weighted),
        contenders=tuple(
            Row(name=one.name, dispatch_model=one.journey.dispatch_model, metrics=figures[one.label].metrics())
            for one in contenders
        ),
    )


def _seconds_options(scene: Scene, contexts: Sequence[Context]) -> SecondsOptions | None:
    """Sources of the seconds, and per metric the largest share of calls outside the sizes measured."""
    costs = scene.costs
    if costs is None:
        return None
    shares = [(name, share) for context in contexts for name, share in context.seconds.extrapolated.items()]
    used = {ENCODING: any(one.wire for one in contexts), FOLDING: any(one.tally.folded is not None for one in contexts)}
    unused = {part for part, is_used in used.items() if not is_used}
    return SecondsOptions(
        sources={part: source for part, source in costs.sources.items() if part not in unused},
        missing={part: why for part, why in costs.missing.items() if part not in unused},
        extrapolated=dict(sorted(shares)),  # by rising share, so that the largest of each stays
        other_dtype=tuple(part for part in costs.other_dtype if part not in unused),
        noisy=tuple(part for part in costs.noisy if part not in unused),
    )
