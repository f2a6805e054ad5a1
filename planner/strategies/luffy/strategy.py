"""LUFFY: every layer's combine delivers each sample to where attention and exchanges together take least
(solvers/luffy).

Legend: I samples; L MoE layers.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import ClassVar

from ....runtime.decisions import DispatchModel
from ....runtime.plan import Plan
from ....solvers.rehoming import compile_rehoming
from ...evaluate.homes import Dealing, Rehoming
from ...evaluate.journey import Contender, Journey
from ...evaluate.metrics import AROUND
from ...evaluate.scene import Scene
from ...params import Params
from ...task import Task
from ..netmoe.policy import TRIED, fitted_predictor
from ..netmoe.strategy import Netmoe, policy_of
from ..strategy import Solution, Strategy
from . import LuffyParams
from .law import law_for
from .recheck import recheck
from .sections import remarks, sections


class Luffy(Netmoe):
    """Samples are re-homed at every layer, by their attention, this layer's routing and a prediction of the next."""

    name = "luffy"
    objectives: ClassVar = {"layer_s": ("attention and exchanges of a layer take", "s")}
    recheck = staticmethod(recheck)
    remarks = staticmethod(remarks)
    sections = staticmethod(sections)

    def deciding(self, decisions: Collection[str]) -> Strategy:
        """Condensing of rows, where that is asked for."""
        from .condensation import STRATEGY as CONDENSES

        return CONDENSES if CONDENSES.decides in decisions else self

    def pads(self, task: Task) -> bool:
        """Padding as asked for."""
        return LuffyParams.of(task.params).batches == "padded"

    def variants(self, task: Task, engine: str | None = None) -> Sequence[Params]:
        """The usual ones where NetMoE has none: attention and exchanges are timed."""
        return () if super().variants(task, engine) else (LuffyParams(),)

    def judged_on(self, scene: Scene, dispatch_model: DispatchModel) -> str:
        """Seconds of attention and both exchanges."""
        return AROUND

    def solve(self, task: Task) -> Solution:
        """Fit the attention law and the predictor; UsageError where attention or exchanges are not timed."""
        law, method = law_for(task), LuffyParams.of(task.params).method
        predictor = fitted_predictor(task, task.placement)
        compiled_s = compile_rehoming(method, law, task.request.cluster)
        return policy_of(task, method, predictor, compiled_s, asked=True, law=law)

    def rivals(self, task: Task, plan: Plan, journey: Journey) -> Sequence[Contender]:
        """NetMoE's rivals; and samples dealt by cost, NetMoE's methods, and LUFFY's Algorithm 1."""
        assert isinstance(journey.homes, Rehoming)
        planned, policy = Contender("plan", journey), replace(journey.homes, bounded=None)
        rows = [*super().rivals(task, plan, journey)]
        rows.append(planned.named("dealt by cost", dispatch_model="standard", homes=Dealing(policy.law)))
        rows += [planned.named(f"netmoe {method}", homes=replace(policy, method=method, law=None)) for method in TRIED]
        if policy.method != "paper":
            assert policy.law is not None
            law = replace(policy.law, numbers="free")
            rows.append(planned.named("paper", homes=replace(policy, method="paper", law=law)))
        return rows


STRATEGY = Luffy()
