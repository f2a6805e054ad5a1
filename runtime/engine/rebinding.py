"""The move of experts to other owners: their rows of parameters, gradients and optimizer states.

Legend: E experts; D devices; O experts that this rank owns; n rows that this rank sends or receives.
"""

import functools
import inspect
import itertools
import math
from collections import defaultdict
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
from .route import Route
from .weights import Weights

#: Optimizers of which every element of a state belongs to one element of the parameter
ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "Adamax", "RMSprop", "Adadelta")

ROUND_BYTES = 1 << 30  # of rows that travel at once, over all ranks; those of a layer do in any case


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
    kinds = states_of(layers, group, optimizer), _gradients(layers, group)
    stacked = [
        [*_parameters(weights), *gradients, *states] for weights, states, gradients in zip(layers, *kinds, strict=True)
    ]
    for some in _rounds(changes, stacked):
        _move([changes[at] for at in some], [stacked[at] for at in some], group)


def _rounds(changes: Sequence[Change], stacked: Sequence[Sequence["_Stacked"]]) -> Iterator[list[int]]:
    """Layers whose rows travel together, by number: rows alike, of so many bytes; the same on all ranks."""
    some, size = list[int](), 0
    columns = [Columns.of(*map(_flat, layer)) for layer in stacked]
    for at, (change, kinds) in enumerate(zip(changes, columns, strict=True)):
        more = int((change.before != change.after).sum()) * sum(kinds.sizes)
        if some and (kinds != columns[some[0]] or size + more > ROUND_BYTES):
            yield some
            some, size = [], 0
        some, size = [*some, at], size + more
    yield some


def _move(changes: Sequence[Change], stacked: Sequence[Sequence["_Stacked"]], group: dist.ProcessGroup | None) -> None:
    """Exchange the rows of layers whose rows are alike."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    moves = [Moves.between(one.before, one.after, rank=rank, size=size) for one in changes]
    rows, device = [[_flat(one) for one in layer] for layer in stacked], stacked[0][0].rows.device
    columns, packed = Columns.of(*rows[0]), []
    for row_OW, move in zip(rows, moves, strict=True):
        sent_n = torch.tensor(move.sent_rows, dtype=torch.int64, device=device)
        packed.append(columns.pack(*(row[sent_n] for row in row_OW)))
    route = Route([move.sent for move in moves], [move.received for move in moves], group)
    arrived = route.start(torch.cat(packed), range(len(moves))).wait()
    for layer, row_OW, move, row_nB in zip(stacked, rows, moves, arrived, strict=True):
        order_O = torch.tensor(move.order, dtype=torch.int64, device=device)
        for one, row, came in zip(layer, row_OW, columns.unpack(row_nB), strict=True):
            after = torch.cat([row, came])[order_O].reshape(len(order_O), *one.rows.shape[1:])
            if len(after) == len(one.rows):
                one.rows.copy_(after)
            else:
                one.replace(after)


def _flat(one: "_Stacked") -> Tensor:
    return one.rows.reshape(len(one.rows), math.prod(one.rows.shape[1:]))


def _parameters(weights: Weights) -> list[_Stacked]:
    def replace(parameter: nn.Parameter, rows: Tensor) -> None:
        # Another type between, so that autograd forgets the shape that gradients had.
        parameter.data = rows.new_empty(0, dtype=torch.float16 if rows.dtype != torch.float16 else torch.float32)
        parameter.data = rows

    return [_Stacked(parameter, functools.partial(replace, parameter)) for parameter in weights.owned]


def _gradients(layers: Sequence[Weights], group: dist.ProcessGroup | None) -> list[list[_Stacked]]:
    """The gradients of parameters that have one on any rank, zero where they had none, by layer."""
    owned = [weights.owned for weights in layers]
    flags = [int(own.grad is not None) for own in itertools.chain(*owned)]
    graded = torch.tensor(flags, device=owned[0][0].device)
    dist.all_reduce(graded, dist.ReduceOp.MAX, group)
    has_one = iter(graded.tolist())

    def replace(parameter: nn.Parameter) -> Callable[[Tensor], None]:
        return lambda rows: setattr(parameter, "grad", rows)

    gradients: list[list[_Stacked]] = [[] for _ in layers]
    for of_layer, parameters in zip(gradients, owned, strict=True):
        for own in parameters:
            if next(has_one):
                own.grad = torch.zeros_like(own) if own.grad is None else own.grad
                of_layer.append(_Stacked(own.grad, replace(own)))
    return gradients


def states_of(
    layers: Sequence[Weights], group: dist.ProcessGroup | None, optimizer: torch.optim.Optimizer | None
) -> list[list[_Stacked]]:
    """The states that have a parameter's shape, by layer; others are of no expert, and the same on all ranks.

    A collective call; errors as in `move_experts`.
    """
    states: list[list[_Stacked]] = [[] for _ in layers]
    shared, refusal = list[dict[str, Any]](), None
    for of_layer, weights in zip(states, layers, strict=True):
        if optimizer is None or not any(own.requires_grad for own in weights.owned):
            continue
        for own in weights.owned:
            state = optimizer.state.get(own, {})
            refusal = refusal or _refusal(optimizer, own, state)
            rows = {name: value for name, value in sorted(state.items()) if _is_of_rows(value)}
            of_layer += [_Stacked(value, _put(state, name)) for name, value in rows.items()]
            shared.append(
                {name: value.dtype if name in rows else _number(value) for name, value in sorted(state.items())}
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
    return states


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
