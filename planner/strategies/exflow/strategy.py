"""ExFlow: experts that follow each other, or serve the same tokens, live together (solvers/exflow).

Legend: L MoE layers; E experts; K experts per token; D devices.
"""

from dataclasses import asdict, replace
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from ....errors import UsageError
from ....runtime.decisions import PlacementDecision
from ....runtime.plan import Plan
from ....solvers import eplb, exflow
from ....solvers.arrays import Ints
from ....solvers.exflow.replan import reconsider
from ....solvers.exflow.strategy import ANNEALING_RATE, BoundKind, ExflowResult
from ....solvers.moves import experts_moved
from ....solvers.outcome import PlacementResult, Status
from ....traces.counts import Counts, Pairs
from ...evaluate.evaluate import Evaluated, verdict
from ...evaluate.journey import Contender, Journey
from ...evaluate.metrics import COPIES, copies_metric
from ...figures import percent
from ...sidecars import dump_proof
from ...task import Task
from ..placement import PlacementStrategy, highest
from ..placement_options import PlacementOptions
from ..strategy import Solution, sidecar
from . import ExflowParams
from .options import Cap, Replanned, Search, StageHops, paid_back_tokens, vectors_a_move
from .recheck import recheck
from .sections import pictures, remarks, sections

FREE_SHARE = 0.2  # of the time limit, to see what a cap costs
MOVES_SHARE = 0.1  # of the time limit, after it, to weigh moves from the plan in force
EVEN = 1.05
PREVIOUS = "previous"  # the contender of the plan in force


class Exflow(PlacementStrategy):
    """Experts that follow each other live together."""

    name = "exflow"
    dispatch_models = ("coherent", "standard")
    objectives: ClassVar = {
        "hops_kept": ("hops kept", "%"),
        "hop_cost": ("a transition costs, in hops inside a node,", ".3f"),
        "affinity_kept": ("pairs of a token's experts kept on one device", "%"),
        "affinity_cost": ("a pair of a token's experts is apart, in hops inside a node,", ".3f"),
        "expected_affinity_kept": ("pairs of a token's experts kept on one device, counting replicas,", "%"),
        "expected_affinity_cost": ("a pair is apart, counting replicas, in hops inside a node,", ".3f"),
        "expected_hops_kept": ("hops kept, as expected with replicas,", "%"),
        "expected_hop_cost": ("a transition costs, as expected with replicas, in hops inside a node,", ".3f"),
    }
    recheck = staticmethod(recheck)
    remarks = staticmethod(remarks)
    sections = staticmethod(sections)
    pictures = staticmethod(pictures)

    def check(self, task: Task) -> None:
        """Refuse a horizon without a plan in force, or where nothing says what experts weigh; before the search."""
        params = ExflowParams.of(task.params)
        if task.previous is not None and params.groups == "whole":
            raise UsageError("--from with --groups whole; moves of single experts split groups: leave one of them out")
        if (horizon := params.horizon) is not None:
            if task.previous is None:
                raise UsageError(f"--horizon {horizon}; expected 1 token or more, below 1e18, beside --from")
            if vectors_a_move(task.model) is None:
                raise UsageError(
                    "--horizon weighs experts, and the trace does not say their ffn_size; import with --ffn-size"
                )

    def counted_pairs(self, task: Task) -> tuple[Pairs, bool]:
        """Pairs that a task's objective counts."""
        copies = _objective(task) == "copies"
        return "first" if copies and task.dispatch_model == "coherent" else "top1", copies

    def place(self, counts: Counts, task: Task, slots: Ints, *, work: float | None = None) -> ExflowResult:
        """Place by the task's objective, within its cap; `work` as `solvers.exflow` takes it."""
        limit_s = ExflowParams.of(task.params).time_limit_s
        return _solved(counts, task, slots, _load_cap(counts, task, slots), limit_s, work=work)

    def solve(self, task: Task) -> Solution:
        """Place the fitted units' experts, near the plan in force where there is one."""
        params, counts, slots_D = ExflowParams.of(task.params), task.counts, task.slots
        task.say(f"solving {self.name}")
        most, limit_s = _load_cap(counts, task, slots_D), params.time_limit_s
        share, work = (1.0 if most is None else 1 - FREE_SHARE), None
        if params.work_s is not None:
            work = ANNEALING_RATE * params.work_s
        result = _solved(counts, task, slots_D, most, share * limit_s, work=work and share * work)
        cap = None
        if most is not None and result.outcome.status is not Status.INTERRUPTED:
            free = _solved(
                counts, task, slots_D, None, FREE_SHARE * limit_s, bound="simple", work=work and FREE_SHARE * work
            )
            value, held = free.outcome.objective.value, highest(counts.loads, free.placement)
            cap = Cap(max_load=most, objective_without=value, highest_without=held)
        proof, sidecars = sidecar("bound", dump_proof(result.thorough.proofs) if result.thorough.proofs else None)
        search = Search(
            objective=_objective(task),
            bound=params.bound,
            proof=proof,
            simple=result.thorough.reasons,
            stages=tuple(StageHops(**asdict(stage)) for stage in result.stages),
            cap=cap,
        )
        timed = replace(result.outcome, compiled_s=result.compiled_s)
        placed = _reconsidered(PlacementResult(result.placement, timed, result.repaired), counts, task, most)
        plan, aside = task.previous, list[Contender]()
        if plan is not None and plan.placement is not None:
            aside = [Contender(PREVIOUS, Journey(plan.dispatch_model, plan.placement, wire=task.wire))]
        return replace(self.solution(placed, task, search=search), aside=aside, sidecars=sidecars)

    def with_figures(self, task: Task, solution: Solution, evaluated: Evaluated) -> Solution:
        """The solution with what replacing the plan in force, where there is one, takes and gives."""
        plan, model, cluster = task.previous, task.model, task.request.cluster
        if plan is None or plan.placement is None:
            return solution
        assert isinstance(solution.decision, PlacementDecision)
        new = solution.decision.placement(model, cluster)
        label, ours = f"{PREVIOUS}/{plan.dispatch_model}", next(iter(evaluated.judged.values()))
        moved, each = int(experts_moved(new, plan.placement).sum()), model.expert_bytes
        copies = ours.gain(COPIES, evaluated.judged[label]).value
        cost = Replanned(
            plan_sha256=plan.plan_sha256,
            experts_moved=moved,
            experts_held=new.num_slots * new.num_layers,
            bytes_moved=None if each is None else moved * each,
            horizon_tokens=ExflowParams.of(task.params).horizon,
            verdict=verdict(evaluated, copies_metric(task.dispatch_model, cluster), against=label),
            paid_back_tokens=paid_back_tokens(moved, copies, model),
        )
        return replace(solution, options=solution.options.model_copy(update={"replanned": cost}))

    def apply_flags(self, plan: Plan) -> str | None:
        """No flags; None where replacing the plan in force does not pay."""
        cost = PlacementOptions.of(plan).replanned
        return "" if cost is None or cost.pays else None


def _objective(task: Task) -> Literal["hops", "copies"]:
    """Objective of a task: "hops", a token's first experts in all layers; "copies", pairs that save it copies.

    Hops are the default where tokens stay with their first expert, copies where they return home. Only annealing knows
    of copies, and of tokens with one expert each hops are all there is.

    Notes
    -----
    A token at the device h of its last first choice goes to the devices x(b_k) of its K experts b_1 .. b_K, and on from
    x(b_1). Its copies in a layer are

        dispatch = |{x(b_k)} - {h}|       <= K - sum_k [x(b_k) = h]                                             (1)
        combine  = |{x(b_k)} - {x(b_1)}|  >= K - 1 - sum_{j < k} [x(b_j) = x(b_k)]                              (2)

    equal where no two of its experts share a device other than h (1), and no three share one (2). What is subtracted
    is pairs, and these are the objective of coherent dispatch: the transitions from first choices to all K next ones,
    and the pairs inside layers. Where tokens return home it is the pairs inside layers alone.
    """
    params = ExflowParams.of(task.params)
    wanted = params.objective or ("copies" if task.dispatch_model == "standard" else "hops")
    return wanted if params.method == "annealing" and task.model.top_k > 1 else "hops"


def _at_home(task: Task) -> bool:
    """Check whether a task keeps copies of tokens that return home: the pairs inside layers alone."""
    return task.dispatch_model == "standard" and _objective(task) == "copies"


def _pairs(counts: Counts, task: Task) -> tuple[NDArray[np.number], NDArray[np.number] | None]:
    """The transitions and the coactivation that the solver is to keep together for a task's objective."""
    at_home = _at_home(task)
    if not at_home:
        task.trace.check_first_choices("--objective hops")
    transitions = np.zeros_like(counts.transitions) if at_home else counts.transitions
    return transitions, counts.coactivation if _objective(task) == "copies" else None


def _solved(
    counts: Counts,
    task: Task,
    slots: Ints,
    max_load: float | None,
    limit_s: float,
    *,
    bound: BoundKind | None = None,
    work: float | None = None,
) -> ExflowResult:
    params, (transitions, coactivation) = ExflowParams.of(task.params), _pairs(counts, task)
    return exflow.solve(
        transitions,
        task.request.cluster,
        coactivation=coactivation,
        loads=counts.loads,
        max_load=max_load,
        slots=slots,
        num_groups=task.model.num_expert_groups,
        groups=params.groups,
        method=params.method,
        backend=params.backend,
        time_limit_s=limit_s,
        work=work,
        bound=bound or params.bound,
        seed=task.request.seed,
        on_bound=lambda share: task.say(f"bounding: at most {percent(share, 2)} of transitions stay"),
    )


def _load_cap(counts: Counts, task: Task, slots: Ints) -> float | None:
    """The cap on a device's share of a layer: as asked for; of copies at home, without replicas, as even as EPLB packs.

    Notes
    -----
    That is the most that EPLB has in any layer, so that there is a placement, and EVEN at least. Experts that one token
    takes together are busy in the same steps, so that steps are less even than these loads: looser caps cost there.
    """
    params, num_experts = ExflowParams.of(task.params), counts.loads.shape[1]
    whole = params.groups == "whole" or slots.max() == 1
    if params.max_load is not None or whole or slots.sum() > num_experts or not _at_home(task):
        return params.max_load
    packed = eplb.solve(counts.loads, task.request.cluster, slots=slots, method="published")
    return max(EVEN, highest(counts.loads, packed.placement))


def _reconsidered(placed: PlacementResult, counts: Counts, task: Task, max_load: float | None) -> PlacementResult:
    """The placement, or one near the plan in force that is worth about as much, or less where moves cost.

    Notes
    -----
    A move takes 3 M H elements, with M the ffn_size and H the hidden_size. What stays saves one vector, under standard
    dispatch of copies a vector there and one back. With T fitted tokens standing for the `horizon` to come, a move
    costs as much as 3 M T / horizon vectors are worth.
    """
    params, old = ExflowParams.of(task.params), None if task.previous is None else task.previous.placement
    if old is None:
        return placed
    price, horizon = 0.0, params.horizon
    if horizon is not None:
        vectors = vectors_a_move(task.model)
        assert vectors is not None  # by `check`
        price = vectors * counts.num_tokens / horizon / (2 if _at_home(task) else 1)
    task.say("weighing moves from the plan in force")
    transitions, coactivation = _pairs(counts, task)
    return reconsider(
        transitions,
        task.request.cluster,
        placed,
        old,
        coactivation=coactivation,
        loads=counts.loads,
        max_load=max_load,
        price=price,
        time_limit_s=MOVES_SHARE * params.time_limit_s,
        seed=task.request.seed,
    )


STRATEGY = Exflow()
