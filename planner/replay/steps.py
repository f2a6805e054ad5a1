"""The steps of a trace that are replayed: their tokens, where these start, and what is predicted of them.

Legend: N tokens of all steps; U units; B steps; L MoE layers; K experts per token; D devices, S slots of each; Q levels
of a prediction (low, middle, high).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError, UsageError
from ...profilers.cluster import Cluster
from ...profilers.profile import Profile
from ...runtime.decisions import Decisions
from ...runtime.plan import Inputs, Plan
from ...solvers.arrays import Bools, Floats, Ints
from ...traces.count_form import CountTrace
from ...traces.embeddings import KEYS, Embeddings
from ...traces.reader import Trace
from ..evaluate.choosers import step_pairs
from ..evaluate.costs import ENCODING, FOLDING
from ..evaluate.evaluate import evaluate
from ..evaluate.journey import Contender, Journey, pads_in, today
from ..evaluate.metrics import COMBINE, COPIES, DISPATCH, EXCHANGE, EXPERTS
from ..evaluate.price import STEP, price
from ..evaluate.rebalancing import check_steps
from ..evaluate.replay import replay
from ..evaluate.scene import BACKWARD, Passes, Scene
from ..evaluate.step_size import StepSize, use_of
from ..evaluate.tally import Tally
from ..evaluate.units import SampleIndex, UnitIndex, index_samples, index_units
from ..loaded_plan import LoadedPlan, common_passes, known_model
from ..strategies.luffy.folding import way_of
from ..strategies.luffy.recorded import recorded

USUAL_TOKENS = 256  # of a step per device

Predicted = Mapping[str, Floats]  # metric to levels of each step, `[Q, B]`


class Recorded(NamedTuple):
    """The tokens of steps, by step, sample and position."""

    ids: NDArray[np.uint16]  #: `[N, L, K]`
    #: step, sample, position, home: of each, `[N]`; steps from 0 on, samples as replicas take turns by them, and the
    #: devices that they start on
    step: Ints
    sample: Ints
    position: Ints
    home: Ints
    weights: NDArray[np.float16] | None = None  #: Gate weights, `[N, L, K]`; None where nobody needs them
    place: Ints | None = None  #: Of each token among the hidden states, `[N]`


@dataclass(frozen=True, eq=False)
class Stage:
    """Steps of a trace under plans."""

    plans: Sequence[LoadedPlan]
    source: Trace | CountTrace
    scene: Scene
    num_steps: int  #: Those run, the first of the scene's
    seen: bool  #: Whether plans were fitted to the samples
    embeddings: Embeddings | None  #: Hidden states, where some plan condenses rows

    @classmethod
    def of(
        cls,
        plans: Sequence[LoadedPlan],
        source: Trace | CountTrace,
        cluster: Cluster,
        *,
        profile: Profile | None,
        tokens: int | None,
        most_steps: int,
        backward: bool,
        seed: int,
    ) -> Self:
        """The first steps that no plan was fitted to, where there are any.

        Recorded steps are taken as they are; else there is one of so many tokens of whole samples or, of decoded
        tokens, several of one token of each of so many sequences.
        """
        _check(plans, source)
        follows = [plan.path for plan in plans if plan.plan.decisions.rebalancing is not None]
        moves = any(plan.moves_samples for plan in plans)
        index = index_samples(source) if moves else index_units(source, by_step=bool(follows))
        if follows:
            check_steps(source, index.num_source_ranks, cluster.num_devices, follows[0])
        if "step" in source.known and tokens is not None:
            raise UsageError(
                f"--tokens-per-step: the steps of {source.path} were recorded, and run as they are; leave it out"
            )
        unseen_U = np.logical_and.reduce([plan.unseen(index, source.sha256, ()) for plan in plans])
        chosen_U, size = _chosen(
            index,
            unseen_U if unseen_U.any() else ~unseen_U,
            tokens or USUAL_TOKENS * cluster.num_devices,
            most_steps,
            decodes=use_of(index.phases, None, whole=moves or index.kind != "sample") == "decode",
        )
        scene = Scene.of(
            source,
            index,
            [chosen_U],
            cluster,
            size=size,
            profile=profile,
            model=known_model(source.meta.model, [one.plan for one in plans]),
            seed=seed,
            passes=_passes(plans, backward=backward),
            padded=any(pads_in(plan.plan) for plan in plans),
        )
        if isinstance(source, CountTrace) and not scene.paired:
            raise UsageError(
                f"{source.path}: counts of {index.num_source_ranks or 'no'} source ranks, steps"
                f" {'' if 'step' in source.known else 'un'}known; expected those of every step by {cluster.num_devices}"
                " source ranks, one for each device, or a trace of tokens"
            )
        number = min(scene.cohorts[0].num_steps, most_steps)
        return cls(plans, source, scene, number, not unseen_U.any(), _states(plans, source))

    @property
    def today(self) -> Plan:
        """The plan that decides nothing."""
        return Plan.make(
            strategies=(),
            seed=0,
            cluster=self.scene.cluster,
            model=self.scene.model,
            inputs=Inputs(),
            decisions=Decisions(dispatch="standard"),
        )

    @cached_property
    def contenders(self) -> list[Contender]:
        """Today, then the plans; rows that stand for others are left out."""
        return [today(self.scene.model, self.scene.cluster), *(_exact(plan).contender for plan in self.plans)]

    @property
    def timed_parts(self) -> dict[str, str]:
        """Parts of these layers whose seconds are predicted where curves are known, as the cost model has them."""
        parts = {"experts": "experts", "dispatch": "exchanges"}
        if any(plan.plan.dispatch_model == "coherent" for plan in self.plans):
            parts["kv"] = "gathering K and V"
        if any(plan.plan.decisions.wire for plan in self.plans):
            parts[ENCODING] = "encoding rows"
        if any(map(_condenses, self.plans)):
            parts[FOLDING] = "finding and folding rows that stand for others"
        return parts

    def schedules(self, turns: int) -> list[dict[int, Ints] | None]:
        """Tables `[L, D, S]` of each plan by the run from which on they hold, of so many runs of each step.

        They are those of the evaluation, which its policy decides on these steps; None of a plan without one.
        """
        group, schedules = self.scene.cluster.devices_per_node, list[dict[int, Ints] | None]()
        for one in self.contenders[1:]:
            if one.journey.following is None:
                schedules.append(None)
                continue
            run = one.journey.following.run(step_pairs(self.scene)[0][:-1], one.journey.placement, group)
            starts = [int((run.period == at).argmax()) for at in range(len(run.tables))]
            schedules.append({turns * start: table for start, table in zip(starts, run.tables, strict=True) if start})
        return schedules

    @cached_property
    def recorded(self) -> Recorded:
        """The tokens of the steps that are run; InputError where one has no expert in some layer."""
        if isinstance(self.source, CountTrace):
            return self._counted()
        (cohort,), columns = self.scene.cohorts, defaultdict[str, list[Any]](list)
        step_M = np.append(cohort.step_of_row, -1)
        for batch, unit_T in self.scene.index.batches(self.source, None, weights=self.embeddings is not None):
            at = cohort.locate(batch, unit_T)
            step_T = step_M[at.step]
            of_all = {name: column[at.rows] for name in KEYS if (column := getattr(batch, name)) is not None}
            of_all |= {"at": step_T, "id": at.turn - at.position, "ids": batch.ids[at.rows], "home": at.home}
            if batch.weights is not None:
                of_all["weights"] = batch.weights[at.rows]
            kept_T = (step_T >= 0) & (step_T < self.num_steps)
            for name, column in of_all.items():
                columns[name].append(column[kept_T])
        whole = {name: np.concatenate(parts) for name, parts in columns.items()}
        order = np.lexsort((whole["position"], whole["id"], whole["at"]))
        whole = {name: column[order] for name, column in whole.items()}
        if (nowhere_N := (whole["ids"] >= self.scene.model.num_experts).any(axis=(1, 2))).any():
            raise InputError(
                f"{self.source.path}: {nowhere_N.sum():,} of {len(order):,} tokens of these steps have no expert in"
                " some layer (dropped, or padding); expected tokens routed everywhere: record without a capacity"
            )
        return Recorded(
            whole["ids"],
            whole["at"].astype(np.int64),
            whole["id"].astype(np.int64),
            whole["position"].astype(np.int64),
            whole["home"],
            whole.get("weights"),
            None if self.embeddings is None else self.embeddings.places(whole),
        )

    def _counted(self) -> Recorded:
        """The token-expert pairs of counts, each a token of its own with one expert, in any order."""
        pairs_BLED, rng = step_pairs(self.scene)[0][: self.num_steps], np.random.default_rng(self.scene.seed)
        number_BLD = pairs_BLED.sum(axis=2)
        if (number_BLD != number_BLD[:, :1]).any():
            raise InputError(
                f"{self.source.path}: layers with other numbers of pairs than the first in one step and source rank"
                " (dropped, or padding); expected tokens that are routed everywhere: record without a capacity"
            )
        parts = list[NDArray[np.uint16]]()
        for step, rank in np.ndindex(number_BLD.shape[0], number_BLD.shape[2]):
            experts = (np.repeat(np.arange(pairs_BLED.shape[2]), of) for of in pairs_BLED[step, :, :, rank])
            parts.append(np.stack([rng.permutation(one) for one in experts], axis=1)[:, :, None].astype(np.uint16))
        number_BD = number_BLD[:, 0]
        step_N, home_N = (one.ravel().repeat(number_BD.ravel()) for one in np.indices(number_BD.shape))
        position_N = np.concatenate([np.arange(len(part)) for part in parts])
        return Recorded(np.concatenate(parts), step_N, home_N, position_N, home_N)

    def predicted(self) -> list[Predicted]:
        """Copies sent, and with a profile seconds, of the MoE layers alone, without attention, a contender each."""
        costs = self.scene.costs
        alone = replace(self.scene, costs=None if costs is None else replace(costs, attention=None, moved=None))
        tallies = evaluate(alone, self.contenders, replay=_with_ports, keep=True).tallies
        by_contender = list[Predicted]()
        for contender, plan in zip(self.contenders, [None, *self.plans], strict=True):
            tally = tallies[contender.label]
            if plan is not None and _condenses(plan):
                assert self.embeddings is not None
                (part,) = recorded(alone, contender.journey, self.embeddings)
                tally = part.condensed(way_of(plan.plan.decisions), tally, alone.cluster)
            seconds = price(tally, contender.journey, alone).levels
            figures = {name: seconds[name] for name in (STEP, EXPERTS) if name in seconds}
            if {DISPATCH, COMBINE} <= seconds.keys():
                figures[EXCHANGE] = seconds[DISPATCH] + seconds[COMBINE]
            if contender.journey.capacity_factor is None:
                figures[COPIES] = np.broadcast_to(_copies(tally), (3, len(tally.loads)))
            by_contender.append({name: of_all[:, : self.num_steps] for name, of_all in figures.items()})
        return by_contender


def _check(plans: Sequence[LoadedPlan], source: Trace | CountTrace) -> None:
    """Refuse plans that do not run on the trace, or not beside one another."""
    follows = [plan.path for plan in plans if plan.plan.decisions.rebalancing is not None]
    if follows and (moves := [plan.path for plan in plans if plan.moves_samples]):
        raise UsageError(f"{follows[0]} goes by steps, and {moves[0]} by samples; replay them one at a time")
    by_token = [plan.path for plan in plans if plan.plan.dispatch_model != "standard" or _condenses(plan)]
    if isinstance(source, CountTrace) and by_token:
        raise UsageError(
            f"{source.path}: counts tell no token's way, by which {by_token[0]} goes; give a trace of tokens"
        )


def _condenses(plan: LoadedPlan) -> bool:
    return plan.plan.decisions.condensation is not None


def _states(plans: Sequence[LoadedPlan], source: Trace | CountTrace) -> Embeddings | None:
    """The hidden states of a trace, where some plan condenses rows; UsageError where there are none."""
    condensing = [plan.path for plan in plans if _condenses(plan)]
    if not condensing or not isinstance(source, Trace):
        return None
    embeddings = Embeddings.beside(source) if source.has_weights else None
    if embeddings is None:
        raise UsageError(
            f"{condensing[0]}: its rows stand for others by their contents, and {source.path} has no hidden states and"
            " gate weights: record with --weights --embeddings all"
        )
    return embeddings


def _with_ports(scene: Scene, journeys: Sequence[Journey], *, ports: bool = False, between: bool = False) -> Any:
    """Tallies that hold copies through ports, without a profile, too."""
    return replay(scene, journeys, ports=True, between=between)


def _copies(tally: Tally) -> Ints:
    """Hidden vectors that leave a device, dispatch and combine, in each step, `[B]`."""
    assert tally.ports is not None
    exchanges = (tally.ports.dispatch, tally.ports.combined)
    return np.asarray(sum(copies[:, :, :, 0].sum(axis=(1, 2, 3)) for copies in exchanges))


def _exact(plan: LoadedPlan) -> LoadedPlan:
    """The plan with every row travelling for itself, as journeys have it."""
    if not _condenses(plan):
        return plan
    decisions = plan.plan.decisions.model_copy(update={"condensation": None})
    return replace(plan, plan=plan.plan.model_copy(update={"decisions": decisions}))


def _passes(plans: Sequence[LoadedPlan], *, backward: bool) -> Passes | None:
    """The passes that run: as plans have them, less a backward pass that does not."""
    planned = common_passes(plans)
    if not backward:
        return planned and replace(planned, backward=0.0)
    return planned if planned is not None and planned.backward else Passes(BACKWARD, full_duplex=False)


def _chosen(
    index: UnitIndex | SampleIndex, among_U: Bools, tokens: int, most_steps: int, *, decodes: bool
) -> tuple[Bools, StepSize]:
    """Mask of the units of the first steps, and the size of steps that were not recorded."""
    if isinstance(index, SampleIndex) and index.step is not None:
        first = np.unique(index.step[among_U])[:most_steps]
        return among_U & np.isin(index.step, first), StepSize("tokens", tokens)
    if isinstance(index, UnitIndex) and index.steps is not None:
        of_U = np.isin(index.steps[:, 0], index.unit_ids[among_U])
        first = np.unique(index.steps[of_U, 1])[:most_steps]
        starts = index.steps[np.isin(index.steps[:, 1], first), 0]
        return among_U & np.isin(index.unit_ids, starts), StepSize("tokens", tokens)
    if decodes:
        return among_U, StepSize("sequences", min(tokens, int(index.unit_tokens[among_U].sum())))
    total_U = np.cumsum(np.where(among_U, index.unit_tokens, 0))
    chosen_U = among_U & (total_U - index.unit_tokens < tokens)
    return chosen_U, StepSize("samples", int(chosen_U.sum()))
