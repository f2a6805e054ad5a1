"""One rank of a replay: its tokens run today and under each plan, in turn, and how long that takes.

Legend: N tokens of all steps, T of one here; B samples here; S positions; L MoE layers; K experts per token; D ranks; R
rounds, each of which runs every plan twice, forth and back; W ways to run: today, then the plans.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...profilers.origin import Environment
from ...profilers.stopwatch import Laps, stopwatch
from ...profilers.world import World
from ...runtime import load_plan, parallelize
from ...runtime.plan import Plan
from ...runtime.rebalancing import Schedule
from ...solvers.arrays import Floats, Ints
from ...traces.embeddings import Embeddings
from ...traces.model import ModelSpec
from .model import LayersAlone, States
from .steps import Recorded

TYPES = {2: torch.bfloat16, 4: torch.float32}  # of elements, by bytes
TURNS = 2  # in which a round runs every plan


class Way(NamedTuple):
    """A way to run steps."""

    plan: Plan | str  #: One that was loaded by its path, for its sidecars
    schedule: Schedule | None = None  #: Tables by the run from which on they hold, where replicas follow the load


class Work(NamedTuple):
    """Work of all ranks."""

    recorded: Recorded
    spec: ModelSpec
    ways: Mapping[str, Way]
    backward: bool
    steps: Sequence[int]  #: The step of each round, `[R]`
    seed: int
    embeddings: Embeddings | None = None  #: Hidden states, where some plan condenses rows


class Timed(NamedTuple):
    """Measurements of a rank."""

    seconds: Floats  #: Of every run, `[R, W, 2]`
    moves: Floats  #: Of experts that change their owners before a round, `[R, W]`
    copies: Ints  #: Hidden vectors sent in a run, `[R, W]`
    laps: list[list[Laps]]  #: By round and way
    environment: Environment


def run(world: World, work: Work) -> Timed:
    """Run all ways in turn on this rank's tokens."""
    ways, num_rounds = list[_Running](), len(work.steps)
    layers = _layers(world, work)
    for way in work.ways.values():
        ways.append(_Running(world, work, way, layers))
        ways[-1].laps(work.steps[0])
        world.report("ready")
    seconds, moves, laps = np.zeros((num_rounds, len(ways), TURNS)), np.zeros((num_rounds, len(ways))), []
    copies, order = np.zeros((num_rounds, len(ways)), np.int64), list(range(len(ways)))
    for number, step in enumerate(work.steps):
        for turn in range(TURNS):
            for at in order[:: -1 if turn else 1]:
                seconds[number, at, turn] = ways[at].seconds(step)
                moved_s = ways[at].settle()
                if turn and number + 1 < num_rounds:
                    moves[number + 1, at] = moved_s
            if turn == 0:  # tables change after the last turn
                laps.append([way.laps(step) for way in ways])
                copies[number] = [way.spread.traffic.copies for way in ways]
        world.report(f"round {number + 1} of {num_rounds}")
    return Timed(seconds, moves, copies, laps, Environment.of(world.device, world.hosts))


def _layers(world: World, work: Work) -> Callable[[], LayersAlone]:
    """A maker of the layers that send tokens where they were recorded to go."""
    recorded, dtype, states = work.recorded, TYPES[work.spec.dtype_bytes or 4], None
    ids_NLK = torch.from_numpy(recorded.ids.astype(np.int32))
    if work.embeddings is not None:
        assert recorded.place is not None
        assert recorded.weights is not None
        (mine,) = np.nonzero(recorded.home == world.rank)
        row_N = np.zeros(len(ids_NLK), np.int64)
        row_N[mine] = np.arange(len(mine))
        by_layer = [
            torch.from_numpy(work.embeddings.layer(layer, recorded.place[mine])).to(dtype)
            for layer in range(work.spec.num_layers)
        ]
        states = States(torch.from_numpy(recorded.weights.astype(np.float32)), torch.from_numpy(row_N), by_layer)
    return lambda: LayersAlone(work.spec, ids_NLK, dtype, states)


class _Running:
    """A way on one rank."""

    def __init__(self, world: World, work: Work, way: Way, layers: Callable[[], LayersAlone]) -> None:
        plan = load_plan(way.plan) if isinstance(way.plan, str) else way.plan
        self.device, self.backward = torch.device(world.device), work.backward
        model = layers().to(self.device).train(mode=work.backward)
        self.spread = parallelize(model, plan, schedule=way.schedule)
        model.fill(work.seed + world.rank)
        if (condensation := self.spread.condensation) is not None:
            condensation.in_eval = True
            if condensation.tau is None:  # it waits for a first loss
                condensation.step(1.0)
        inputs = (_inputs(work.recorded, step, world.rank, plan.dispatch_model) for step in range(max(work.steps) + 1))
        self.inputs = [[one.to(self.device) for one in of_step] for of_step in inputs]
        self.optimizer, self._updated = None, 0.0
        if self.spread.rebalancing is not None:  # its state moves with the experts, which stay what they are
            self.optimizer = torch.optim.AdamW(self.spread.parameters(), lr=0.0)
            self.optimizer.register_step_post_hook(self._update_done)

    def run(self, step: int) -> None:
        """Run a step."""
        with contextlib.nullcontext() if self.backward else torch.inference_mode():
            y = self.spread(*self.inputs[step])
            if self.backward:
                y.sum().backward()

    def seconds(self, step: int) -> float:
        """Seconds of a step, from a barrier on."""
        dist.barrier()
        started = time.perf_counter()
        self.run(step)
        self._wait()
        return time.perf_counter() - started

    def settle(self) -> float:
        """Let go of gradients; seconds in which experts change their owners, after an optimizer has updated them."""
        if self.optimizer is None:
            self.spread.zero_grad()
            return 0.0
        for own in self.spread.parameters():  # of experts that nobody asked, too
            own.grad = torch.zeros_like(own) if own.grad is None else own.grad
        self.optimizer.step()
        self._wait()
        moved_s = time.perf_counter() - self._updated
        self.optimizer.zero_grad()
        return moved_s

    def laps(self, step: int) -> Laps:
        """Seconds of the parts of a step, each from a barrier on."""
        with stopwatch() as laps:
            self.run(step)
        self.spread.zero_grad()
        return laps

    def _update_done(self, *_unused: object) -> None:
        """Note when all ranks have updated their parameters; hooks of the runtime follow."""
        self._wait()
        dist.barrier()
        self._updated = time.perf_counter()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _inputs(recorded: Recorded, step: int, rank: int, dispatch: str) -> list[Tensor]:
    """Numbers of this rank's tokens of a step, the samples that they take turns by, and which are real.

    A token that returns is a sample of its own, so that nothing is padded; others are beside those of their sample:
    under coherent dispatch, those that follow one another, so that replicas take turns by their positions.
    """
    of_step_N = recorded.step == step
    (number_T,) = np.nonzero(of_step_N & (recorded.home == rank))
    sample_T, position_T = recorded.sample[number_T], recorded.position[number_T]
    if dispatch == "standard":
        return [torch.from_numpy(number_T)[:, None], torch.from_numpy(sample_T + position_T)]
    coherent = dispatch == "coherent"
    starts_T = np.diff(sample_T, prepend=-1) != 0
    if coherent:
        starts_T |= np.diff(position_T, prepend=-1) != 1
    row_T, (start_B,) = np.cumsum(starts_T) - 1, np.nonzero(starts_T)
    column_T = np.arange(len(number_T)) - start_B[row_T]
    longest = int(np.unique(recorded.sample[of_step_N], return_counts=True)[1].max())  # on any rank
    tokens_BS = np.zeros((len(start_B), longest), np.int64)
    real_BS = np.zeros(tokens_BS.shape, np.bool_)
    tokens_BS[row_T, column_T], real_BS[row_T, column_T] = number_T, True
    samples_B = sample_T[start_B] + coherent * position_T[start_B]
    return [torch.from_numpy(one) for one in (tokens_BS, samples_B, real_BS)]
