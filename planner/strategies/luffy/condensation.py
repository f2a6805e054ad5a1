"""LUFFY's condensation: rows that need not travel, since one that is near stands for them. Results change.

Hidden states beside the trace tell the rows that this saves; only the model tells the loss that it costs.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

from ....errors import CertificationError, UsageError
from ....files import sha256_file
from ....runtime.decisions import CondensationDecision
from ....runtime.plan import Metric, Plan
from ....runtime.wire import copy_bytes
from ....solvers.outcome import ROUNDING, Objective, Outcome
from ....traces.embeddings import Embeddings
from ...certify.certificate import Certificate
from ...evaluate.journey import Journey, journey_of, today
from ...solve import Solved, decide
from ...task import Task
from ..strategy import Recheck, Solution, Strategy
from . import LuffyParams
from .condensation_sections import answer, sections
from .folding import EXACT, Counted, Gate, History, Star, Way, reach
from .measured import Judged, Measured, measured
from .options import CondensationOptions, CondensedPart, WayRecord
from .recorded import Recorded, recorded
from .together import refuse_both

REACHES = 1e-3, 3.0  # between which a reach is sought: gates times distances are at most 3
TRIALS = 9
PAPER = 0.8  # the cosine that the paper trains with


class Condensation(Strategy):
    """Rows for another device that are near to one another travel as one."""

    name = "luffy"
    decides = "condensation"
    beside = frozenset({"placement", "pipeline", "sample_policy"})  # the last to be refused by figures
    unjudged = "rows and errors of condensation: only moeplan solve counts them, and it finds the same plan again"
    uses = frozenset({"prefill", "training"})
    objectives: ClassVar = {"rows_sent": ("rows that travel, of all to other devices,", "%")}
    answer = staticmethod(answer)
    sections = staticmethod(sections)

    def recheck(self, plan: Plan, again: Recheck | None, certificate: Certificate) -> None:
        """Recheck that what is recorded agrees with itself; rows are counted by `solve` alone."""
        options = CondensationOptions.of(plan)
        if self.decides in plan.outcome:
            value = plan.outcome[self.decides].objective.value
            certificate.agree("objective", value, 1 - options.fit.ways[0].rows_saved)
        for way in (*options.fit.ways, *(options.held_out.ways if options.held_out else ())):
            if not min(way.layers_saved) - ROUNDING <= way.rows_saved <= max(way.layers_saved) + ROUNDING:
                raise CertificationError(
                    f"{way.name}: {100 * way.rows_saved:.2f} % of rows saved; expected between"
                    f" {100 * min(way.layers_saved):.2f} and {100 * max(way.layers_saved):.2f} %, those of its layers"
                )
        certificate.checked("record of condensation")

    def make(self, task: Task) -> Solved:
        """The plan; what is known of it stands in its options, and no verdict calls it a benefit."""
        decided = decide(task)
        return Solved(decided.plan, decided.sidecars)

    def solve(self, task: Task) -> Solution:
        """Choose how near rows must be, and recount what that saves beside its rivals.

        UsageError without hidden states and without a model, beside re-homed samples, and where no threshold keeps what
        was asked for.
        """
        started, params, scene = time.perf_counter(), LuffyParams.of(task.params), task.scene
        journey = _journey(task)
        if journey.homes is not None:
            refuse_both(task, journey, None if params.condense is None else _asked(task))
        if params.model is not None and params.text is not None:
            task.say(f"running {params.model} on {params.text}")
            way, parts = _by_model(task, measured(scene, journey, params.model, params.text))
        else:
            embeddings = Embeddings.beside(task.trace)
            if embeddings is None:
                raise UsageError(
                    f"{task.trace.path}: no hidden states beside it, which tell the rows that are near; record with"
                    " --weights --embeddings all, or give --model and --text"
                )
            way, parts = _by_states(task, recorded(scene, journey, embeddings))
        options = CondensationOptions(
            evidence="hidden states" if params.model is None else "model",
            model=params.model,
            text_sha256=None if params.text is None else sha256_file(params.text),
            most_bits=params.condense_loss,
            most_error=params.condense_error,
            fit=parts[0],
            held_out=parts[1] if len(parts) > 1 else None,
        )
        sent = Objective("rows_sent", 1 - parts[0].ways[0].rows_saved, "min")
        return Solution(_decision(params, way), options, Outcome.of(objective=sent, started=started))


def _journey(task: Task) -> Journey:
    """The journey of tokens under the decisions of the base, or as today."""
    if (base := task.base) is None or not base.decisions.names:
        return today(task.model, task.request.cluster).journey
    on = task.request.on
    assert on is not None
    return journey_of(base, lambda file: file.read(on.parent))


def _decision(params: LuffyParams, way: Way) -> CondensationDecision:
    """The decision of a way, under the schedule asked for."""
    asked, rule = params.condense_schedule, way.cluster
    star, paper = isinstance(rule, Star), asked == "paper"
    return CondensationDecision(
        criterion="star" if star else "gate",
        tau=rule.tau if isinstance(rule, Gate) else None,
        threshold=rule.threshold if isinstance(rule, Star) and not paper else None,
        h_max=rule.threshold if isinstance(rule, Star) and paper else None,
        schedule="fixed" if asked is None else "paper" if paper else "share",
        target=asked if isinstance(asked, float) else None,
        medoid=way.medoid,
    )


def _by_states(task: Task, parts: list[Recorded]) -> tuple[Way, list[CondensedPart]]:
    """The plan's way and what hidden states say of it and its rivals."""
    params = LuffyParams.of(task.params)
    assert params.condense is not None
    way = _asked(task)
    ways = [way, *_equals(task, way, parts[0].count), *_papers(params)]
    return way, [
        _part(task, number, [(one, part.count(one), None) for one in ways]) for number, part in enumerate(parts)
    ]


def _by_model(task: Task, parts: list[Measured]) -> tuple[Way, list[CondensedPart]]:
    """The plan's way and what the model says of it and its rivals."""
    params, fit, seed = LuffyParams.of(task.params), parts[0], task.request.seed
    exact = fit.judge(EXACT)
    way = _asked(task)
    if params.condense is None:
        task.say("choosing how near rows must be on the fitted samples")
        by_loss = params.condense_loss is not None
        most = params.condense_loss if by_loss else params.condense_error
        assert most is not None

        def cost(to: float) -> float:
            judged = fit.judge(reach(way, to))
            return judged.rise(exact, seed)[0] if by_loss else judged.error(seed)[0]

        if (to := furthest(cost, most)) is None:
            raise UsageError(
                f"--condense-{'loss' if by_loss else 'error'} {most:g}: no rows can be condensed within it; give more,"
                " or leave rows as they are"
            )
        way = reach(way, to)
    learned = 1 - exact.loss / math.log2(exact.vocabulary)  # the fall of the loss from that of a guess
    literal = 1 / (1 + math.exp(learned))
    rivals = [Way("fp8 rows alone", wire="fp8")]
    if way.wire is None:
        rivals = [replace(way, name="plan + fp8", wire="fp8"), *rivals]
    rivals += [*_equals(task, way, fit.count), *_papers(params)]
    rivals += [_star("Eq. 2 literal", literal), _star("Eq. 2 corrected", 2 * literal)]
    task.say("running the model the plan's way and its rivals'")
    records = []
    for number, part in enumerate(parts):
        as_is = exact if part is fit else part.judge(EXACT)
        rows = [(one, judged.counted, judged) for one in (way, *rivals) for judged in (part.judge(one),)]
        records.append(_part(task, number, rows, as_is))
    return way, records


def _asked(task: Task) -> Way:
    """The plan's way: the rule, wire and reach asked for; any reach where it is still to be chosen."""
    params = LuffyParams.of(task.params)
    if params.method == "paper":
        return replace(_star("plan", PAPER if params.condense is None else params.condense), wire=task.wire)
    tau = 1.0 if params.condense is None else params.condense
    return Way("plan", Gate(tau), medoid=params.medoid, wire=task.wire)


def _star(name: str, threshold: float) -> Way:
    return Way(f"{name}, cosine {threshold:.2f}" if name != "plan" else name, Star(threshold), medoid=True)


def _papers(params: LuffyParams) -> Iterator[Way]:
    """The paper's own threshold, and its history rule."""
    yield _star("paper", PAPER)
    s1, s2 = params.condense_history
    yield Way(f"paper, history {s1:g}:{s2:g}", History(PAPER, s1, s2), medoid=True)


def _equals(task: Task, way: Way, count: Callable[[Way], Counted]) -> list[Way]:
    """Rivals that save about as many rows on the fitted samples: the other rule, and second experts left out."""
    saved = count(way).saved()
    task.say("rivals of equal rows")
    other = (
        Way("gates, as many rows", Gate(1.0)) if isinstance(way.cluster, Star) else _star("paper, as many rows", 0.5)
    )
    rows = list[Way]()
    if saved and (to := furthest(lambda to: count(reach(other, to)).saved(), saved)) is not None:
        other = reach(other, to)
        rows.append(_star("paper, as many rows", other.cluster.threshold) if isinstance(other.cluster, Star) else other)
    if saved and task.model.top_k > 1:
        gate = furthest(lambda gate: count(Way("dropped", drop=gate)).saved(), saved, (1e-3, 1.0))
        if gate is not None:
            which = "all second experts dropped" if gate == 1.0 else f"second experts dropped below {gate:.2f}"
            rows.append(Way(which, drop=gate))
    return rows


def furthest(cost: Callable[[float], float], most: float, between: tuple[float, float] = REACHES) -> float | None:
    """The furthest reach whose cost, which rises with it, is at most `most`, by bisection; None where none is found."""
    low, high = between
    if cost(high) <= most:
        return high
    best = None
    for _ in range(TRIALS):
        middle = math.sqrt(low * high)
        if cost(middle) <= most:
            best = low = middle
        else:
            high = middle
    return best


def _part(
    task: Task, number: int, rows: Sequence[tuple[Way, Counted, Judged | None]], exact: Judged | None = None
) -> CondensedPart:
    """The record of ways on a part of the trace."""
    cohort, seed, model = task.scene.cohorts[number], task.request.seed, task.model
    ways = list[WayRecord]()
    for way, counted, judged in rows:
        saved, as_is, on_wire = counted.saved(), model.copy_bytes, copy_bytes(model, way.wire)
        ways.append(
            WayRecord(
                name=way.name,
                rows_saved=saved,
                far_saved=counted.saved("far_rows", "far_sent"),
                bytes_saved=None if as_is is None or on_wire is None else 1 - (1 - saved) * on_wire / as_is,
                pairs_saved=counted.saved("pairs", "computed"),
                layers_saved=tuple(counted.saved(layer=layer) for layer in range(len(counted.layers))),
                error=None if judged is None else _metric(judged.error(seed)),
                bits=None if judged is None or exact is None else _metric(judged.rise(exact, seed)),
            )
        )
    return CondensedPart(
        num_samples=len(cohort.unit_ids) - cohort.dropped,
        num_steps=cohort.num_steps,
        tokens_per_step=_tokens_per_step(task, number),
        rows_per_step=rows[0][1].all["rows"] / cohort.num_steps,
        loss_bits=None if exact is None else exact.loss,
        ways=tuple(ways),
    )


def _tokens_per_step(task: Task, number: int) -> float:
    """Recorded tokens per step. A part of less than one step is not scaled up: its rows near others are not either."""
    cohort = task.scene.cohorts[number]
    if cohort.step is None:
        return cohort.tokens_per_step
    return float(cohort.unit_tokens[cohort.step >= 0].sum()) / cohort.num_steps


def _metric(value_low_high: tuple[float, float, float]) -> Metric:
    value, low, high = value_low_high
    return Metric(value=value, low=low, high=high)


STRATEGY = Condensation()
