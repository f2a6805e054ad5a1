"""Protocol of a strategy: its decision, its rivals, its recheck and its screen."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

from ...runtime.decisions import Decision, DispatchModel, Record, SidecarFile
from ...runtime.plan import Part, Plan
from ...solvers.outcome import Outcome
from ...traces.counts import Counts
from ..document import Section, Table
from ..evaluate.evaluate import Evaluated
from ..evaluate.journey import Contender, Journey, pads_in, passes_of
from ..evaluate.metrics import copies_metric
from ..evaluate.scene import BACKWARD, Passes, Scene
from ..params import Params, flags_of, option_of

if TYPE_CHECKING:
    from ..certify.certificate import Certificate
    from ..certify.recounted import Recounted
    from ..solve import Solved
    from ..task import Task


@dataclass(frozen=True, slots=True)
class Solution:
    """A strategy's own decision with its evidence on the fitted units."""

    decision: Decision
    options: Record  #: How it was decided; the plan keeps it under the decision's name
    outcome: Outcome
    aside: Sequence[Contender] = ()  #: Contenders that are judged beside the plan, but not kept in it
    #: Files that lie beside the plan and that it names, name to contents
    sidecars: Mapping[str, bytes] = field(default_factory=dict)


def sidecar(kind: str, contents: bytes | None) -> tuple[SidecarFile | None, dict[str, bytes]]:
    """The name of a file that lies beside a plan, with its contents under it; nothing without contents."""
    if contents is None:
        return None, {}
    named = SidecarFile.of(kind, contents)
    return named, {named.file: contents}


@dataclass(frozen=True, slots=True)
class Recheck:
    """A plan that is certified on its trace: its task, counted anew, and the folder of its sidecars."""

    task: "Recounted"
    #: The plan and its rivals judged by the naive replay; None unless the strategy made the plan's last decision
    evaluated: Evaluated | None
    folder: Path


class Strategy:
    """A strategy; one folder each, and a row in `registry`."""

    name: ClassVar[str]
    decides: ClassVar[str] = ""  #: Key of its decision in a plan; empty: it chooses among other strategies
    #: What certify leaves unchecked of its plans without an evaluation
    unjudged: ClassVar[str] = (
        "decisions, objective and bound: the plan has no evaluation to recompute; re-run moeplan solve"
    )
    unchecked: ClassVar[str] = ""  #: What certify leaves unchecked of its choice among other strategies
    #: Dispatch models it makes sense under, the default first
    dispatch_models: ClassVar[tuple[DispatchModel, ...]] = ("standard",)
    beside: ClassVar[frozenset[str]] = frozenset()  #: Decisions that its base (`--on`) may hold
    #: Share of the baseline's value that a gain must be above to pay for what no metric but `step_s` holds
    min_gain: ClassVar[float] = 0.0
    #: The outcome depends on the steps, the profile and the links, not on the fitted units alone
    by_steps: ClassVar[bool] = False
    #: Steps are its units, and later ones are held out: it decides between steps, by what it has seen
    by_time: ClassVar[bool] = False
    shifts_load: ClassVar[bool] = True  #: It may change what devices compute, and not only when or for whom
    moves_samples: ClassVar[bool] = False  #: Samples may be re-homed, and are counted one by one
    uses: ClassVar[frozenset[str]] = frozenset({"decode", "prefill", "training"})  #: What it can serve
    by_loads: ClassVar[bool] = False  #: The loads of experts are enough, as a trace in count form has them
    timeline: ClassVar[ModuleType | None] = None  #: Draws a layer of its plans over time
    #: Words and format of each objective's figure: "s" seconds, "%" a share; a number that ends a name goes in at {}
    objectives: ClassVar[Mapping[str, tuple[str, str]]] = {}

    def deciding(self, decisions: Collection[str]) -> "Strategy":
        """The strategy as it decides one of these kinds, where it can decide several."""
        return self

    def check(self, task: "Task") -> None:
        """Refuse a task that cannot be solved, before anything is read."""

    def passes(self, task: "Task") -> Passes | None:
        """The passes of a step: the base's where it cuts layers into chunks, both in training, else None."""
        if task.base is not None and task.base.decisions.pipeline is not None:
            return passes_of(task.base)
        return Passes(BACKWARD, full_duplex=False) if task.use == "training" else None

    def pads(self, task: "Task") -> bool:
        """Check whether attention pads the samples of a device, as the base's policy says."""
        return task.base is not None and pads_in(task.base)

    def count(self, task: "Task") -> Counts:
        """Counts of the fitted units, from which placements are made."""
        raise NotImplementedError

    def solve(self, task: "Task") -> Solution:
        """Decide by the fitted part of a task; UsageError and InputError say what it asks for, or lacks."""
        raise NotImplementedError

    def make(self, task: "Task") -> "Solved":
        """The plan of a task with its sidecars, judged."""
        from ..solve import decide, judge

        return judge(decide(task))

    @property
    def usual(self) -> Params:
        """Parameters where nothing is asked for."""
        from .registry import STRATEGIES

        return STRATEGIES[self.name].params()

    def variants(self, task: "Task", engine: str | None = None) -> Sequence[Params]:
        """The parameters that auto tries for a task, of plans that an engine must carry out where one is named."""
        return (self.usual,)

    def why_auto_skips(self, task: "Task") -> str:
        """Why auto leaves it out although it may serve the task; empty where there is nothing to say."""
        return ""

    def titled(self, params: Params) -> str:
        """The strategy by name, with what sets its parameters apart from others that auto tries."""
        usual = type(params)()
        asked = [
            f"{option_of(name, one)} {getattr(params, name)}"
            for name, one in flags_of(type(params))
            if getattr(params, name) != getattr(usual, name)
        ]
        return ", ".join([self.name, *asked])

    def stands_on(self, plan: Plan) -> bool:
        """Check whether the strategy's decision may be added to those of a plan."""
        decided = {*plan.decisions.names}
        return decided <= self.beside and self.decides not in decided and plan.dispatch_model != "coherent"

    def bound(self, journey: Journey) -> Journey | None:
        """Lower bound: a journey at least as fast as any decision of this strategy gives; None: not known."""
        return None

    def journey_of_plan(self, task: "Task", plan: Plan, journey: Journey) -> Journey:
        """Journey to judge the plan on; a strategy may add bounds."""
        return journey

    def rivals(self, task: "Task", plan: Plan, journey: Journey) -> Sequence[Contender]:
        """Rivals of the plan besides today's baseline: baselines, an oracle, the plan without one of its parts."""
        return ()

    def judged_on(self, scene: Scene, dispatch_model: DispatchModel) -> str:
        """The metric of the verdict where `step_s` cannot be compared."""
        return copies_metric(dispatch_model, scene.cluster)

    def recheck(self, plan: Plan, again: Recheck | None, certificate: "Certificate") -> None:
        """Hold a plan's claims on this decision against its definition; without `again`, what the plan alone shows.

        The certificate takes the figures, what was checked and what was not; CertificationError where a rule is broken,
        or a bound is better than what is proven.
        """

    def with_figures(self, task: "Task", solution: Solution, evaluated: Evaluated) -> Solution:
        """The solution with figures that are known only after evaluation."""
        return solution

    def apply_flags(self, plan: Plan) -> str | None:
        """Flags of `moeplan apply` that carry the plan out as was asked for; None: the plan in force is better kept."""
        return ""

    def answer(self, plan: Plan) -> str:
        """The answer of a plan that is not judged by its evaluation; empty for others."""
        return ""

    def remarks(self, plan: Plan, part: Part) -> Iterator[str]:
        """Remarks on the judging part, the most important first."""
        return iter(())

    def table(self, plan: Plan, part: Part) -> Table | None:
        """The table beside today, where it is not of the plan's contenders."""
        return None

    def sections(self, plan: Plan, width: int) -> Iterator[Section]:
        """Sections on the strategy in a plan's document, for a screen of `width` characters."""
        return iter(())

    def pictures(self, plan: Plan, folder: Path, task: "Task | None") -> Iterator[Section]:
        """Sections with pictures in a plan's page: of the plan, the files beside it in `folder`, and the trace.

        `task` is None where the plan's trace is not at hand.
        """
        return iter(())
