"""Replicas that follow the load of a training: a policy decides beside a step, and ranks take its tables after it.

Legend: L MoE layers; E experts; D devices; S slots of a device; W records of the window.
"""

import dataclasses
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from ..errors import UsageError
from ..solvers.arrays import Ints
from ..solvers.cost import inter_ratio
from .engine.gather import agree, all_gather, together
from .engine.layer import ParallelExperts, change_of, rebind
from .engine.layer_placement import LayerPlacement
from .engine.loads import Loads
from .engine.rebinding import Moving, states_of
from .engine.watch import naming_lost_ranks
from .gradients import at_steps
from .plan import Plan
from .rebalancing import EMPTY, Schedule, checked_schedule, owners_hold, placement_of, policy_of, tables_of
from .rebalancing_state import State, array_of, check_state

if TYPE_CHECKING:
    from ..solvers.flexmoe import Operation


class _Known(NamedTuple):
    """Facts that a decision about one layer goes by."""

    layer: int
    window: Ints  #: `[W, 1, E, D]`
    table: Ints  #: `[D, S]`
    owner: Ints  #: `[E]`


class Rebalancer:
    """The placements of a model in training, which its plan's policy changes as the load does.

    The token-expert pairs of one step in `record_steps` are a record. Rank l mod D decides the table of layer l in a
    thread, while the next step runs. Once the optimizer has taken that step, ranks tell each other the tables. Experts
    that change their owner travel while one more step runs, and their gradients before its optimizer; then all take the
    tables. So all hold the same ones, and the same counts lead to the same tables at the same steps. Tables of a
    schedule are taken at their step, and training waits for moves.

    Parameters
    ----------
    blocks
        The experts of each MoE layer.
    schedule
        Tables `[L, D, S]` by the first step, from 0, that is to run under them, in place of the policy.
    moves_per_step
        Most changes of owners after one step; None: no limit. A layer is never split; layers left over follow after
        later steps, and nothing is decided before they have.

    Attributes
    ----------
    step
        Optimizer steps taken that trained the experts.
    tables
        The expert in every slot, -1 in an empty one, `[L, D, S]`.
    balance
        Max/mean load of the devices in the last step, over its micro-batches, by layer, `[L]`.
    operations
        Changes that were made; `record` is the first step that ran so.
    moved
        Experts that changed their owner, optimizer state included.
    planning_s
        CPU seconds of the decisions made on this rank.
    """

    def __init__(
        self,
        plan: Plan,
        blocks: Sequence[ParallelExperts],
        group: dist.ProcessGroup | None,
        schedule: Schedule | None = None,
        moves_per_step: int | None = None,
    ) -> None:
        decision, placement = plan.decisions.rebalancing, plan.placement
        assert decision is not None
        assert placement is not None
        self.blocks, self.group = blocks, group
        self.num_experts, self.devices_per_node = plan.model.num_experts, plan.cluster.devices_per_node
        self._far_cost = round(inter_ratio(plan.cluster))
        self.step, self.moved, self.planning_s = 0, 0, 0.0
        self.tables, self.balance = tables_of(placement), np.ones(len(blocks))
        self._decided_last, self._moves_per_step = self.tables.copy(), moves_per_step
        self._coming = list[int]()  # layers whose new tables hold after the next step
        self._moving: Moving | None = None  # their experts, where they are on their way
        self._beside = group  # by which these travel; ranks outside a smaller group do not help to make another
        self.operations: list[Operation] = []
        self._rule, self._costs = policy_of(decision)
        self._records, self._record_steps = 0, decision.record_steps
        self._window: deque[Ints] = deque(maxlen=self._rule.window)  # records `[L, E, D]`, latest last
        self._deciding: Future[tuple[list[Ints], float]] | None = None
        self._thread = ThreadPoolExecutor(1, "moeplan-rebalancing")
        self._holders = weakref.WeakSet[Optimizer]()  # optimizers that hold experts
        # Other optimizers, by the forwards that waited when they took their last step
        self._strangers = weakref.WeakKeyDictionary[Optimizer, int]()
        for block in blocks:
            block.loads = Loads()
        if schedule is None and decision.stays:
            schedule = {}
        self._schedule = None if schedule is None else checked_schedule(schedule, placement)
        told = [(step, table.tolist()) for step, table in (self._schedule or {}).items()]
        agree(repr((told, moves_per_step)), "schedule or number of moves of rebalancing", group)
        if self._schedule is not None:
            self._decided_last = self._schedule.get(0, self.tables).copy()
            self._take(None)
        elif group is None or group is dist.group.WORLD:
            self._beside = dist.new_group(backend=dist.get_backend())
        at_steps(self, before=Rebalancer.before_step, after=Rebalancer.after_step)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of the model follows nothing

    @property
    def changes(self) -> list[tuple[int, int]]:
        """Every change of a table: the first step that ran under the new one, and the layer."""
        return sorted({(one.record, one.layer) for one in self.operations})

    # Around a step

    @naming_lost_ranks()
    def before_step(self, optimizer: Optimizer) -> None:
        """Let experts arrive that travelled while the step ran; a collective call before the optimizer takes it.

        Raises
        ------
        UsageError, MismatchError
            As `rebind`, or as `Moving.arrive`.
        """
        if self._forwards and self._coming and self._is_of_experts(optimizer):
            self._arrive(optimizer)

    @naming_lost_ranks()
    def after_step(self, optimizer: Optimizer) -> None:
        """Take the tables that were decided while the step ran, and begin to decide the next; a collective call.

        Raises
        ------
        UsageError
            No optimizer holds the experts' parameters, or owners cannot change under this one.
        """
        loads = [block.loads or Loads() for block in self.blocks]
        if not self._forwards or not self._trains(optimizer, self._forwards):
            return
        if self._coming:  # the forward ran within the step, by a closure
            self._arrive(optimizer)
        recorded = self._schedule is None and self.step % self._record_steps == 0
        self.step += 1
        self.balance = np.array([load.balance for load in loads])
        if self._schedule is not None:
            self._decided_last = self._schedule.get(self.step, self._decided_last)
        elif self._deciding is not None:
            tables, seconds = self._deciding.result()
            self._deciding, self.planning_s = None, self.planning_s + seconds
            self._decided_last = self._told(tables)
        self._take(optimizer)
        if recorded:
            none = np.zeros((self.num_experts, self.tables.shape[1]), np.int64)
            self._window.append(np.stack([none if load.pairs is None else load.pairs for load in loads]))
            self._records += 1
            if self._waiting <= {*self._coming}:
                self._decide()
        for load in loads:
            load.clear()

    @property
    def _forwards(self) -> int:
        """Forwards that had a backward pass since the last step."""
        return sum(block.loads.forwards for block in self.blocks if block.loads)

    def _arrive(self, optimizer: Optimizer) -> None:
        """Let layers hold what is on its way, gradients included; a collective call."""
        self._hold(self._coming, self.step + 1, optimizer, self._moving)
        self._coming, self._moving = [], None

    def _trains(self, optimizer: Optimizer, waiting: int) -> bool:
        """Check whether an optimizer holds experts' parameters, or all are frozen; so many forwards wait for a step."""
        if self._is_of_experts(optimizer):
            return True
        if self.step == 0 and self._strangers.get(optimizer, waiting) < waiting:
            raise UsageError(
                f"{type(optimizer).__name__} took two steps and holds none of the experts' parameters, and no other"
                " optimizer took one; make one of model.parameters(), or freeze the experts"
            )
        self._strangers[optimizer] = waiting
        return False

    def _is_of_experts(self, optimizer: Optimizer) -> bool:
        """Check whether an optimizer holds experts' parameters, or all are frozen; collective when first asked."""
        if optimizer in self._holders:
            return True
        trained = {id(own) for block in self.blocks for own in block.parameters() if own.requires_grad}
        if any(id(own) in trained for group in optimizer.param_groups for own in group["params"]):
            tables = None if self._schedule is None else self._schedule.values()
            if tables is None or not all(owners_hold(one, self._owners).all() for one in tables):
                states_of([block.weights for block in self.blocks], self.group, optimizer)  # refused now, not at a move
            self._holders.add(optimizer)
        return not trained or optimizer in self._holders

    def _told(self, tables: Sequence[Ints]) -> Ints:
        """The tables of all layers `[L, D, S]`, from those that each rank decided; a collective call."""
        size, shape = dist.get_world_size(self.group), self.tables.shape[1:]
        most = -(-len(self.blocks) // size)
        sent = torch.full((most, *shape), EMPTY, dtype=torch.int32)
        sent[: len(tables)] = torch.from_numpy(np.array(tables).reshape(-1, *shape))
        sent = sent.to(self.blocks[0].placement.slot_of_expert.device)
        arrived = sent.new_empty(size * most, *shape)
        work = all_gather(arrived, sent, self.group)
        if work is not None:
            work.wait()
        by_layer = arrived.view(size, most, *shape).transpose(0, 1).flatten(0, 1)
        told: Ints = by_layer[: len(self.blocks)].cpu().numpy().astype(np.int64)
        return told

    @property
    def _waiting(self) -> set[int]:
        """The layers that do not hold what was decided last."""
        return {*np.flatnonzero((self._decided_last != self.tables).any(axis=(1, 2))).tolist()}

    def _owner(self, layer: int) -> Ints:
        """The owners of a layer's experts `[E]` once it holds what was decided last."""
        from ..solvers.flexmoe.state import holds, homes_after

        held = holds(self._decided_last[layer], self.num_experts)
        return homes_after(self.blocks[layer].placement.owner, held, self.devices_per_node)

    def _take(self, optimizer: Optimizer | None) -> None:
        """Take the tables decided last, with as many changes of owners as there may be now; a collective call.

        Under a policy experts begin to travel, and tables hold after the next step.
        """
        taken, leaving, moving = list[int](), list[int](), 0
        for layer in sorted(self._waiting):
            moves = int((self._owner(layer) != self.blocks[layer].placement.owner).sum())
            if moving and moves and self._moves_per_step is not None and moving + moves > self._moves_per_step:
                continue  # after a later step
            taken.append(layer)
            leaving += [layer] * bool(moves)
            moving += moves
        if self._schedule is not None:
            self._hold(taken, self.step, optimizer)
            return
        changes = [change_of(self.blocks[layer], self._owner(layer)) for layer in leaving]
        self._moving = Moving.start(changes, self._beside, optimizer) if changes else None
        later = leaving[len(self._moving.changes) :] if self._moving else []
        self._coming = [layer for layer in taken if layer not in later]

    def _hold(
        self, layers: Sequence[int], step: int, optimizer: Optimizer | None, moving: Moving | None = None
    ) -> None:
        """Let layers hold from a step on what was decided last; a collective call."""
        from ..solvers.flexmoe.follow import operations
        from ..solvers.flexmoe.state import holds

        if not layers:
            return
        done: list[Operation] = []
        owners = {layer: self._owner(layer) for layer in layers}
        for layer in layers:
            before, after = (holds(one[layer], self.num_experts) for one in (self.tables, self._decided_last))
            done += operations(before, after, step, layer, self.devices_per_node)
        moved = sum(int((new != self.blocks[layer].placement.owner).sum()) for layer, new in owners.items())
        self._rebind(self._decided_last, owners, optimizer, moving)
        self.operations, self.moved = self.operations + done, self.moved + moved

    @property
    def _owners(self) -> Ints:
        """The device that owns each expert, `[L, E]`."""
        return np.stack([block.placement.owner for block in self.blocks])

    def _rebind(
        self, tables: Ints, owners: Mapping[int, Ints], optimizer: Optimizer | None, moving: Moving | None = None
    ) -> None:
        """Let layers hold what tables `[L, D, S]` say, by owners `[E]`; a collective call."""
        changes = []
        for layer, owner in owners.items():
            block = self.blocks[layer]
            place = LayerPlacement.of(
                placement_of(tables[layer], self.num_experts),
                0,
                devices_per_node=self.devices_per_node,
                far_cost=self._far_cost,
                group=self.group,
                device=block.placement.slot_of_expert.device,
                owner=owner,
                counted=True,
            )
            changes.append((block, place))
        rebind(changes, optimizer, moving)
        self.tables[[*owners]] = tables[[*owners]]

    # The decision

    def _decide(self) -> None:
        """Begin to decide the tables that follow those decided last, of this rank's layers."""
        mine = range(dist.get_rank(self.group), len(self.blocks), dist.get_world_size(self.group))
        known = [
            _Known(
                layer,
                np.stack([record[layer] for record in self._window])[:, None],
                self._decided_last[layer].copy(),
                self._owner(layer),
            )
            for layer in mine
        ]
        self._deciding = self._thread.submit(self._decided, known, self._records - 1)

    def _decided(self, known: Sequence[_Known], record: int) -> tuple[list[Ints], float]:
        """The tables from now on of these layers, and the CPU seconds that it took to decide."""
        from ..solvers.flexmoe import Seen

        started, tables = time.thread_time(), list[Ints]()
        for layer, window, table, owner in known:
            seen = Seen.of(record, layer, window, table, owner, group=self.devices_per_node, costs=self._costs)
            new = self._rule(seen) if window.any() else None  # idle layers stay, as in `follow`
            tables.append(table if new is None else new)
        return tables, time.thread_time() - started

    # What is kept

    def state_dict(self) -> State:
        """State between two steps, from which training goes on as it would have; the same on all ranks."""
        return {
            "step": self.step,
            "records": self._records,
            "deciding": self._deciding is not None,
            "tables": torch.from_numpy(self.tables.copy()),
            "decided_last": torch.from_numpy(self._decided_last.copy()),
            "coming": [*self._coming],
            "owners": torch.from_numpy(self._owners),
            "window": [torch.from_numpy(record) for record in self._window],
            "balance": torch.from_numpy(self.balance),
            "operations": [dataclasses.astuple(one) for one in self.operations],
            "moved": self.moved,
            "planning_s": self.planning_s,
        }

    @naming_lost_ranks()
    def load_state_dict(self, state: State, optimizer: Optimizer | None = None) -> None:
        """Go on from a state; a collective call between two steps, before the optimizer's own state is loaded.

        Parameters
        ----------
        optimizer
            Where its state is loaded already, so that it moves with the experts.

        Raises
        ------
        MismatchError
            The state is of other sizes, breaks a rule, or is another on other ranks; nothing was changed.
        UsageError
            Gradients wait for a step; nothing was changed.
        """
        from ..solvers.flexmoe import Operation

        with together(self.group):
            self._check_step_done()
            check_state(state, self.tables, self.num_experts)
        tables, owners, decided = (array_of(state[name]) for name in ("tables", "owners", "decided_last"))
        told = repr((state["step"], tables.tolist(), owners.tolist(), decided.tolist(), state["coming"]))
        agree(told, "state of rebalancing", self.group)
        if self._moving is not None:
            self._moving.drop()
        self._rebind(tables, dict(enumerate(owners)), optimizer)
        self._decided_last = decided.copy()
        self._coming, self._moving = [*state["coming"]], None  # they move before the next step, at once
        self.step, self._records, self.moved = state["step"], state["records"], state["moved"]
        self.balance, self.planning_s = array_of(state["balance"]), state["planning_s"]
        self.operations = [Operation(*one) for one in state["operations"]]
        self._window.clear()
        self._window.extend(array_of(record) for record in state["window"])
        self._deciding = None
        for block in self.blocks:
            block.loads = Loads()
        if state["deciding"] and self._schedule is None:
            self._decide()

    def _check_step_done(self) -> None:
        """Refuse gradients that wait for a step: they are of the weights before."""
        if self._forwards and any(
            own.grad is not None and own.grad.any() for block in self.blocks for own in block.parameters()
        ):
            raise UsageError(
                "a state of rebalancing loaded between a backward pass and the optimizer's step; take the step first,"
                " or drop its gradients with zero_grad()"
            )
