"""The weights of a layer's experts on one rank: parameters of the experts that it owns, and replicas of others.

Both lie in one stack per parameter, owned experts first. The optimizer, checkpoints and wrappers see the parameters,
which are the stack's first rows; experts compute with the whole stack. Weights go from owners to replicas after they
have changed, gradients of replicas to owners. Where layers share their stacks, owned rows are copied and replicas are
sent whenever another layer's were there.

Legend: S slots of this rank; O experts owned here; R replicas here.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from ...errors import UsageError
from .layer_placement import LayerPlacement
from .replica_rows import Outgoing, ReplicaRows
from .watch import naming_lost_ranks

Gradients = list[Tensor | None]
CHANGED, FOLLOWING_CHANGED, DROPPED = 1, 2, 4  # bits of a note


class SharedStacks:
    """Stacks of one layer, in which all layers compute in turn.

    Attributes
    ----------
    holder
        The layer whose weights are there, the same on all ranks.
    """

    holder: "Weights | None" = None

    def __init__(self) -> None:
        self._memory: dict[int, Tensor] = {}  # bytes, by the parameter's number
        self._most: dict[int, int] = {}  # that any layer asked for

    def __getstate__(self) -> dict[str, Any]:
        return {"_memory": {}, "_most": self._most}  # a copy of the model holds nothing yet

    @property
    def nbytes(self) -> int:
        """Bytes of all stacks."""
        return sum(memory.nbytes for memory in self._memory.values())

    def stack(self, number: int, own: Tensor, num_slots: int, before: Tensor | None) -> Tensor:
        """The stack `[S, ...]` of a layer's parameter, which is `before` where that still is in place."""
        size = num_slots * own.shape[1:].numel() * own.element_size()
        self._most[number] = max(size, self._most.get(number, 0))
        memory = self._memory.get(number)
        if memory is None or memory.device != own.device or len(memory) < size:
            memory = self._memory[number] = own.new_empty(self._most[number], dtype=torch.uint8)
        stack = memory[:size].view(own.dtype).view(num_slots, *own.shape[1:]).detach()
        if before is None or before.data_ptr() != stack.data_ptr():
            return stack
        return before if (before.shape, before.dtype) == (stack.shape, stack.dtype) else stack


class Weights:
    """The weights of a layer's experts on this rank.

    Parameters
    ----------
    experts
        The module that computes, with parameters `[O, ...]`.
    gradient_share
        Factor of gradients.
    shared
        The stacks that layers share; None: this layer has its own, and parameters lie in them.

    Attributes
    ----------
    put_off
        Whether gradients of replicas wait for a later backward pass, as under DistributedDataParallel's `no_sync`.
    following
        Weights of the next layer, whose rows travel while this layer computes.
    """

    rows: ReplicaRows | None
    following: "Weights | None" = None
    put_off = False
    _stale: bool  #: Whether an optimizer may have changed them since they were sent
    _seen: tuple[tuple[int, int], ...]  #: Versions that were sent

    def __init__(
        self,
        experts: nn.Module,
        placement: LayerPlacement,
        gradient_share: float,
        shared: SharedStacks | None = None,
    ) -> None:
        self.experts, self.gradient_share, self.shared = experts, gradient_share, shared
        self._forget()
        self.take(placement)

    def take(self, placement: LayerPlacement) -> None:
        """Hold the replicas of a placement from now on; owned experts are those that the parameters have."""
        self.rows, self.num_slots, self._stale = placement.rows, len(placement.held), True
        self._lay_out()

    @property
    def owned(self) -> list[nn.Parameter]:
        """The parameters, `[O, ...]`."""
        return list(self.experts.parameters())

    @property
    def replica_bytes(self) -> int:
        """Bytes of the replicas' weights, in memory of their own or shared."""
        return sum(stack[len(own) :].nbytes for stack, own in zip(self._stacks, self.owned, strict=False))

    @property
    def leaves(self) -> Sequence[Tensor]:
        """Weights that experts compute with and gradients are asked by, `[S, ...]`."""
        if self.rows is None:
            return self.owned
        for stack, own in zip(self._stacks, self.owned, strict=True):
            stack.requires_grad_(own.requires_grad)
        return self._stacks

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Let the module compute with all slots."""
        if self.rows is None:
            yield
            return
        own = dict(self.experts.named_parameters())
        self.experts._parameters.update(zip(own, self._stacks, strict=True))  # type: ignore[arg-type]
        try:
            yield
        finally:
            self.experts._parameters.update(own)

    # From owners to replicas

    @property
    def note(self) -> int | None:
        """Bits that all ranks are told before experts compute; None where there is nothing to tell, on any rank."""
        following = self.following
        if self.rows is None and (following is None or following.rows is None):
            return None
        if in_backward():  # a block that runs again: nothing has changed since its forward
            return CHANGED * self._replaced
        dropped = bool(self._waiting) and any(own.grad is None for own in self.owned if len(own) and own.requires_grad)
        changed, next_changed = self._changed, following is not None and following._changed
        return CHANGED * changed | FOLLOWING_CHANGED * next_changed | DROPPED * dropped

    def agreed(self, notes: Sequence[int]) -> None:
        """Start what the notes of all ranks ask for; a collective call that does not wait."""
        if any(note & DROPPED for note in notes):
            self._waiting.clear()
        if any(note & CHANGED for note in notes):
            self.send()
        if any(note & FOLLOWING_CHANGED for note in notes):
            assert self.following is not None
            self.following.send()

    @torch.no_grad()
    def send(self) -> None:
        """Begin to send owned rows to all replicas; a collective call that does not wait."""
        assert self.rows is not None
        for _, outgoing in self._travelling:
            outgoing.wait()
        self._travelling.clear()
        self._lay_out()
        self._stale, self._seen = False, self._versions
        for kind in self._kinds(self._stacks):
            rows = [self.owned[number][self.rows.slots].flatten(1) for number in kind]
            self._travelling.append((kind, self.rows.send(torch.cat(rows, dim=1))))

    def advance(self) -> None:
        """Pass on rows under way; a collective call."""
        for _, outgoing in self._travelling:
            outgoing.advance()

    @torch.no_grad()
    def arrive(self) -> None:
        """Put rows under way in their slots; a collective call."""
        for kind, outgoing in self._travelling:
            rows = self._parted(outgoing.wait(), kind)
            for number, row_R in zip(kind, rows, strict=True):
                own, stack = self.owned[number], self._stacks[number].data
                stack[len(own) :] = row_R
                if self.shared is not None:
                    stack[: len(own)] = own
        if self._travelling and self.shared is not None:
            self.shared.holder = self
        self._travelling.clear()

    @property
    def version(self) -> object:
        """Equal to what it was as long as experts compute with the same weights in the same place."""
        return self._versions, [stack.data_ptr() for stack in self._stacks]

    def restore(self, version: object) -> None:
        """Begin to bring back the weights that a forward had, for its backward pass, where another layer's are now.

        A collective call that does not wait.

        Raises
        ------
        UsageError
            The weights are not those of that version any more.
        """
        if self._replaced:
            self.send()
        if version != self.version:
            raise UsageError(
                "experts' weights changed between a forward and its backward pass; run the backward pass first"
            )

    # From replicas to owners

    def settled(self, gradients: Gradients, *, put_off: bool) -> Gradients:
        """Gradients of the owned experts, `[O, ...]`, from those of all slots, `[S, ...]`; a collective call.

        Those of replicas are summed to their owners, or put off.
        """
        if self.rows is None:
            return [None if gradient is None else gradient.mul_(self.gradient_share) for gradient in gradients]
        owned: Gradients = []
        for number, (gradient, own) in enumerate(zip(gradients, self.owned, strict=True)):
            if gradient is None:
                owned.append(None)
                continue
            owned.append(gradient[: len(own)] * self.gradient_share)
            replicas = gradient[len(own) :] * self.gradient_share
            self._waiting[number] = self._waiting[number] + replicas if number in self._waiting else replicas
        if self._waiting and not put_off:
            self._collect(owned)
        return owned

    @naming_lost_ranks()
    def collect(self) -> None:
        """Sum gradients that wait to their owners; a collective call."""
        if not self._waiting:
            return
        for number in self._waiting:
            own = self.owned[number]
            own.grad = torch.zeros_like(own) if own.grad is None else own.grad
        self._collect([own.grad for own in self.owned])

    @torch.no_grad()
    def _collect(self, owned: Gradients) -> None:
        assert self.rows is not None
        for kind in self._kinds(self._waiting):
            summed = self.rows.summed(torch.cat([self._waiting[number].flatten(1) for number in kind], dim=1))
            for number, row_O in zip(kind, self._parted(summed, kind), strict=True):
                total = owned[number]
                assert total is not None
                total.index_add_(0, self.rows.slots, row_O)
        self._waiting.clear()
        self._stale = True  # an optimizer may follow

    # Stacks

    def _forget(self) -> None:
        self._stacks: list[Tensor] = []
        self._stale, self._seen = True, ()
        self._travelling: list[tuple[list[int], Outgoing]] = []
        self._waiting: dict[int, Tensor] = {}  # gradients of replicas that are put off, by the parameter's number

    def __getstate__(self) -> dict[str, Any]:
        kept = ("experts", "gradient_share", "shared", "rows", "num_slots")
        return {name: value for name, value in vars(self).items() if name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    @property
    def _versions(self) -> tuple[tuple[int, int], ...]:
        return tuple((own.data_ptr(), own._version) for own in self.owned)

    @property
    def _changed(self) -> bool:
        return self.rows is not None and (self._stale or self._versions != self._seen or self._replaced)

    @property
    def _replaced(self) -> bool:
        """Check whether another layer's weights are in the shared stacks, and none of this layer's are on their way."""
        if self.rows is None or self.shared is None or self._travelling:
            return False
        return self.shared.holder is not self

    @torch.inference_mode(False)
    @torch.no_grad()
    def _lay_out(self) -> None:
        """Let every parameter be the first rows of a stack `[S, ...]`, where it is not, or of none that is shared."""
        if self.rows is None:
            for own in self.owned if self._stacks and self.shared is None else ():
                own.data = own.detach().clone()  # frees the stack
            self._stacks = []
            return
        stacks = []
        for number, own in enumerate(self.owned):
            stack = self._stacks[number] if self._stacks else None
            if self.shared is not None:
                stack = self.shared.stack(number, own, self.num_slots, stack)
            elif stack is None or not _is_within(own, stack) or len(stack) != self.num_slots:
                stack = own.new_empty(self.num_slots, *own.shape[1:])
                stack[: len(own)] = own
                if not own.is_meta:
                    own.data = from_dlpack(stack[: len(own)])  # a storage that ends there: what is saved does
            stacks.append(stack)
        self._stacks = stacks

    def _kinds(self, numbered: "Sequence[Tensor] | dict[int, Tensor]") -> list[list[int]]:
        """Numbers of parameters by element type: what travels together."""
        numbers = list(numbered) if isinstance(numbered, dict) else list(range(len(numbered)))
        by_type: dict[torch.dtype, list[int]] = {}
        for number in numbers:
            by_type.setdefault(numbered[number].dtype, []).append(number)
        return list(by_type.values())

    def _parted(self, rows: Tensor, kind: Sequence[int]) -> list[Tensor]:
        """Rows `[n, W]` as those of each parameter, `[n, ...]`."""
        shapes = [self._stacks[number].shape[1:] for number in kind]
        parts = torch.split(rows, [shape.numel() for shape in shapes], dim=1)
        return [part.reshape(len(rows), *shape) for part, shape in zip(parts, shapes, strict=True)]


def in_backward() -> bool:
    """Check whether this runs within a backward pass: a checkpointed block does, again."""
    return bool(torch._C._current_graph_task_id() != -1)


def _is_within(own: Tensor, stack: Tensor) -> bool:
    """Check whether the rows of a parameter are the first of a stack."""
    same = own.dtype == stack.dtype and own.device == stack.device and own.shape[1:] == stack.shape[1:]
    return same and (not len(own) or own.data_ptr() == stack.data_ptr())
