"""The move of experts to other owners: their rows of parameters, gradients and optimizer states.

Legend: E experts; D devices; O experts that this rank owns; n rows that this rank sends or receives.
"""

import functools
import inspect
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import MismatchError, UsageError
from ...solvers.arrays import Ints
from .gather import gathered
from .payload import Columns
from .route import Pending, Route
from .weights import Weights

#: Optimizers of which every element of a state belongs to one element of the parameter
ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "Adamax", "RMSprop", "Adadelta")

ROUND_BYTES = 1 << 29  # of rows that a rank sends or receives at once; those of a layer do in any case


class Change(NamedTuple):
    """Owners of a layer's experts, int64 `[E]`."""

    weights: Weights
    before: Ints
    after: Ints


@dataclass(frozen=True, slots=True)
class Moves:
    """Rows that one rank sends and receives when experts change their owners.

    Parameters
    ----------
    sent_rows
        The rows of this rank that are sent, by destination, `[n]`.
    sent, received
        Rows to and from each device, `[D]`.
    order
        Where the rows that it owns afterwards lie among those of before and those that arrive, behind, `[O]`.
    """

    sent_rows: list[int]
    sent: list[int]
    received: list[int]
    order: list[int]

    @classmethod
    def between(cls, old_E: Ints, new_E: Ints, *, rank: int, size: int) -> "Moves":
        """The moves of `rank` from one device to another of each expert; owned experts ascend."""
        before = {int(expert): row for row, expert in enumerate((old_E == rank).nonzero()[0])}
        leaving, coming = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
        for expert in (old_E != new_E).nonzero()[0].tolist():
            if old_E[expert] == rank:
                leaving[int(new_E[expert])].append(before[expert])
            if new_E[expert] == rank:
                coming[int(old_E[expert])].append(expert)
        arriving = itertools.chain(*(coming[device] for device in range(size)))
        place = before | {expert: len(before) + number for number, expert in enumerate(arriving)}
        return cls(
            list(itertools.chain(*(leaving[device] for device in range(size)))),
            [len(leaving[device]) for device in range(size)],
            [len(coming[device]) for device in range(size)],
            [place[expert] for expert in (new_E == rank).nonzero()[0].tolist()],
        )


class _Stacked(NamedTuple):
    """Rows of the experts that this rank owns, `[O, ...]`, and how others, of another number, take their place."""

    rows: Tensor
    replace: Callable[[Tensor], None]


@torch.no_grad()
def move_experts(
    changes: Sequence[Change], group: dist.ProcessGroup | None, optimizer: torch.optim.Optimizer | None
) -> None:
    """Let experts of some layers have other owners: their rows go there, in place; a collective call between steps.

    Parameters stay the same objects. Where a rank comes to own another number of experts, their tensors are new.

    Raises
    ------
    UsageError
        Rows of the optimizer's state do not belong to experts; nothing was moved.
    MismatchError
        The states of ranks are of different steps, or some have none; nothing was moved.
    """
    changes = [one for one in changes if (one.before != one.after).any()]
    if not changes:
        return
    layers = [one.weights for one in changes]
    states, (gradients, _) = states_of(layers, group, optimizer), _gradients(layers, group)
    stacked = [[*_parameters(one), *rows, *kept] for one, rows, kept in zip(layers, gradients, states, strict=True)]
    _move(changes, stacked, group)


@dataclass(frozen=True, slots=True)
class Moving:
    """Experts on their way to other owners while a step runs under those of before.

    Parameters and states are sent as they are now; `arrive` sends again what was written to since. Gradients follow
    when they are known.

    Parameters
    ----------
    changes
        The layers whose experts are on their way.
    exchange
        Their rows.
    """

    changes: list[Change]
    exchange: "_Exchange"

    @classmethod
    @torch.no_grad()
    def start(
        cls, changes: Sequence[Change], group: dist.ProcessGroup | None, optimizer: torch.optim.Optimizer | None
    ) -> "Moving":
        """Send parameters and states, of the first of these layers that `ROUND_BYTES` lets travel together.

        A collective call that does not wait.

        Parameters
        ----------
        changes
            Layers of which every one has an expert that changes its owner.
        group
            By which nothing else had better travel: over NCCL it would wait.

        Raises
        ------
        UsageError, MismatchError
            As in `move_experts`.
        """
        layers = [one.weights for one in changes]
        states = states_of(layers, group, optimizer)
        stacked = [[*_parameters(one), *kept] for one, kept in zip(layers, states, strict=True)]
        some = next(_rounds(changes, stacked))
        first = [changes[at] for at in some]
        return cls(first, _Exchange.start(first, [stacked[at] for at in some], group))

    @torch.no_grad()
    def arrive(self, group: dist.ProcessGroup | None, optimizer: torch.optim.Optimizer | None) -> None:
        """Let the experts have their new owners, gradients included; a collective call before an optimizer's step.

        Where a parameter or state that was sent has changed since, as by a checkpoint, all are sent again.
        """
        layers = [one.weights for one in self.changes]
        stacked = [[*_parameters(one), *_states(one, optimizer)] for one in layers]
        gradients, changed = _gradients(layers, group, changed=not self.exchange.carries(stacked))
        if changed:
            self.drop()
            move_experts(self.changes, group, optimizer)
            return
        self.exchange.place(stacked)
        _move(self.changes, gradients, group)

    def drop(self) -> None:
        """Let what was sent go, once it has arrived."""
        self.exchange.pending.wait()


def _move(changes: Sequence[Change], stacked: Sequence[Sequence["_Stacked"]], group: dist.ProcessGroup | None) -> None:
    """Exchange rows and put them in place, no more than `ROUND_BYTES` at once."""
    for some in _rounds(changes, stacked):
        rows = [stacked[at] for at in some]
        if rows[0]:
            _Exchange.start([changes[at] for at in some], rows, group).place(rows)


def _rounds(changes: Sequence[Change], stacked: Sequence[Sequence[_Stacked]]) -> Iterator[list[int]]:
    """Layers whose rows travel together, by number: rows alike, of so many bytes; the same on all ranks."""
    some, busy = list[int](), Counter[tuple[int, int]]()
    columns = [_columns(layer) for layer in stacked]
    for at, (change, kinds) in enumerate(zip(changes, columns, strict=True)):
        moved, ways = change.before != change.after, enumerate((change.before, change.after))
        more = Counter((way, device) for way, owner_E in ways for device in owner_E[moved].tolist())  # rows
        if some and (kinds != columns[some[0]] or max((busy + more).values()) * sum(kinds.sizes) > ROUND_BYTES):
            yield some
            some, busy = [], Counter()
        some, busy = [*some, at], busy + more
    yield some


class _Exchange(NamedTuple):
    """Rows of layers, whose columns are the same, under way."""

    moves: list[Moves]
    columns: Columns
    packed: Tensor
    pending: Pending

    @classmethod
    def start(
        cls, changes: Sequence[Change], stacked: Sequence[Sequence[_Stacked]], group: dist.ProcessGroup | None
    ) -> "_Exchange":
        """Send them; a collective call that does not wait."""
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        moves = [Moves.between(one.before, one.after, rank=rank, size=size) for one in changes]
        packed = _packed(moves, stacked)
        route = Route([move.sent for move in moves], [move.received for move in moves], group)
        return cls(moves, _columns(stacked[0]), packed, route.start(packed, range(len(moves))))

    def carries(self, stacked: Sequence[Sequence[_Stacked]]) -> bool:
        """Check whether what was sent is what these would send."""
        alike = all(_columns(layer) == self.columns for layer in stacked)
        return alike and torch.equal(_packed(self.moves, stacked), self.packed)

    def place(self, stacked: Sequence[Sequence[_Stacked]]) -> None:
        """Put the rows that arrive among those that stay."""
        for layer, move, row_nB in zip(stacked, self.moves, self.pending.wait(), strict=True):
            if not (move.sent_rows or len(row_nB)):
                continue  # this rank's stay where they are
            order_O = torch.tensor(move.order, dtype=torch.int64, device=row_nB.device)
            for one, came in zip(layer, self.columns.unpack(row_nB), strict=True):
                after = torch.cat([_flat(one), came])[order_O].reshape(len(order_O), *one.rows.shape[1:])
                if len(after) == len(one.rows):
                    one.rows.copy_(after)
                else:
                    one.replace(after)


def _columns(layer: Sequence[_Stacked]) -> Columns:
    return Columns.of(*map(_flat, layer))


def _packed(moves: Sequence[Moves], stacked: Sequence[Sequence[_Stacked]]) -> Tensor:
    """The rows that this rank sends, layer by layer."""
    columns, packed = _columns(stacked[0]), []
    for layer, move in zip(stacked, moves, strict=True):
        sent_n = torch.tensor(move.sent_rows, dtype=torch.int64, device=layer[0].rows.device)
        packed.append(columns.pack(*(_flat(one)[sent_n] for one in layer)))
    return torch.cat(packed)


def _flat(one: "_Stacked") -> Tensor:
    return one.rows.reshape(len(one.rows), math.prod(one.rows.shape[1:]))


def _parameters(weights: Weights) -> list[_Stacked]:
    def replace(parameter: nn.Parameter, rows: Tensor) -> None:
        # Another type between, so that autograd forgets the shape that gradients had.
        parameter.data = rows.new_empty(0, dtype=torch.float16 if rows.dtype != torch.float16 else torch.float32)
        parameter.data = rows

    return [_Stacked(parameter, functools.partial(replace, parameter)) for parameter in weights.owned]


def _gradients(
    layers: Sequence[Weights], group: dist.ProcessGroup | None, *, changed: bool = False
) -> tuple[list[list[_Stacked]], bool]:
    """Gradients by layer, of parameters that have one on any rank, zero where they had none; and `changed` of any rank.

    A collective call.
    """
    owned = [weights.owned for weights in layers]
    flags = [int(own.grad is not None) for own in itertools.chain(*owned)]
    told = torch.tensor([changed, *flags], device=owned[0][0].device, dtype=torch.int64)
    dist.all_reduce(told, dist.ReduceOp.MAX, group)
    any_changed, *graded = told.tolist()
    has_one = iter(graded)

    def replace(parameter: nn.Parameter) -> Callable[[Tensor], None]:
        return lambda rows: setattr(parameter, "grad", rows)

    gradients: list[list[_Stacked]] = [[] for _ in layers]
    for of_layer, parameters in zip(gradients, owned, strict=True):
        for own in parameters:
            if next(has_one):
                own.grad = torch.zeros_like(own) if own.grad is None else own.grad
                of_layer.append(_Stacked(own.grad, replace(own)))
    return gradients, bool(any_changed)


def states_of(
    layers: Sequence[Weights], group: dist.ProcessGroup | None, optimizer: torch.optim.Optimizer | None
) -> list[list[_Stacked]]:
    """The states that have a parameter's shape, by layer; others are of no expert, and the same on all ranks.

    A collective call; errors as in `move_experts`.
    """
    shared, refusal = list[dict[str, Any]](), None
    for own, state in itertools.chain(*(_kept(weights, optimizer) for weights in layers)):
        assert optimizer is not None
        refusal = refusal or _refusal(optimizer, own, state)
        shared.append(
            {name: value.dtype if _is_of_rows(value) else _number(value) for name, value in sorted(state.items())}
        )
    told = gathered((refusal, shared), group)
    for rank, (theirs, _) in enumerate(told):
        if theirs is not None:
            raise UsageError(f"rank {rank}: {theirs}")
    for rank, (_, kept) in enumerate(told):
        for theirs_of_one, ours in zip(kept, told[0][1], strict=True):
            if theirs_of_one != ours:
                raise MismatchError(
                    f"rank {rank}'s optimizer has other states of experts than rank 0's ({theirs_of_one} and {ours});"
                    " move experts where all ranks have taken the same steps"
                )
    return [_states(weights, optimizer) for weights in layers]


def _states(weights: Weights, optimizer: torch.optim.Optimizer | None) -> list[_Stacked]:
    return [
        _Stacked(value, _put(state, name))
        for _, state in _kept(weights, optimizer)
        for name, value in sorted(state.items())
        if _is_of_rows(value)
    ]


def _kept(weights: Weights, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
    """Parameters of a trained layer, each with its state in the optimizer."""
    if optimizer is not None and any(own.requires_grad for own in weights.owned):
        for own in weights.owned:
            yield own, optimizer.state.get(own, {})


def _refusal(optimizer: torch.optim.Optimizer, own: nn.Parameter, state: dict[str, Any]) -> str | None:
    """Why this state cannot follow an expert, in words; None: it can."""
    name = type(optimizer).__name__
    if not any(own is parameter for group in optimizer.param_groups for parameter in group["params"]):
        return f"{name} does not hold the experts' parameters; give the optimizer that does, not one of copies of them"
    if not _is_elementwise(type(optimizer)):
        return (
            f"experts cannot change owners under {name}, whose state may mix experts; expected one of"
            f" {', '.join(ELEMENTWISE)}, or a schedule under which owners stay, as {{}}"
        )
    for key, value in state.items():
        if _is_of_rows(value) and (value.shape != own.shape or value.dtype == torch.uint8):
            return (
                f"{name} keeps {key} {list(value.shape)} {value.dtype} of a parameter {list(own.shape)}: not by expert"
            )
        if _is_of_rows(value) and value.device != own.device:
            return f"{name} keeps {key} on {value.device} of a parameter on {own.device}; keep both on one device"
    return None


def _is_elementwise(kind: type[torch.optim.Optimizer]) -> bool:
    """Check for one of torch's optimizers, or a subclass that takes the same step."""
    steps = (getattr(one, "step", None) for one in kind.__mro__ if one.__name__ in ELEMENTWISE)
    return any(step is not None and inspect.unwrap(step) is inspect.unwrap(kind.step) for step in steps)


def _is_of_rows(value: object) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def _put(state: dict[str, Any], name: str) -> Callable[[Tensor], None]:
    return lambda rows: state.update({name: rows})


def _number(value: object) -> object:
    return value.item() if isinstance(value, Tensor) else value
