"""The expert-parallel routed block: this rank's experts of one layer, and the trips of tokens to all of them.

Legend: T tokens; K experts per token; M hidden size; E experts; n rows that arrive; m copies received; S slots.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import UsageError
from ...profilers.routed import applied, partial_sums
from ...profilers.stopwatch import lap
from ...solvers.arrays import Ints
from ..wire import Wire
from .chunks import Chunks
from .condenser import Condenser
from .copies import Copies, select, select_buffers
from .layer_placement import LayerPlacement
from .loads import Counts, Loads
from .rebinding import Change, Moving, move_experts
from .traffic import Sent, Traffic
from .trip import Trip
from .uncompiled import uncompiled
from .watch import naming_lost_ranks
from .weights import SharedStacks, Weights, in_backward


@dataclass(frozen=True, slots=True)
class RoutedTokens:
    """Experts that one layer's router chose for the tokens that this rank held."""

    #: sample, position: which tokens, int64 `[T]`
    sample: Tensor
    position: Tensor
    ids: Tensor  #: Their experts, int64 `[T, K]`, largest gate weight first


class _Last:
    """The last forward, apart from the module, whose attributes take long to set.

    Attributes
    ----------
    pairs
        Token-expert pairs that were computed here since the last trip began.
    trips
        Trips recorded for a backward pass, while anybody holds their outputs.
    """

    routed: RoutedTokens
    sent: Sent
    counts: Counts | None = None  #: Of all ranks, where steps are split by them

    def __init__(self) -> None:
        self.pairs, self.trips = 0, weakref.WeakSet[Trip]()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Last, ()  # a copy of the module had no forward yet

    @property
    def waiting(self) -> int:
        """Trips whose backward pass has not run."""
        return sum(bool(trip.pieces) for trip in self.trips)


class ParallelExperts(nn.Module):
    """The experts of a routed block, spread over the ranks of `group` by a placement; takes the place of `experts`.

    Parameters
    ----------
    experts
        Experts that this rank owns, called as `experts(x_TM, slots_TK, weight_TK)` once they are beside replicas.
    chunks
        The pieces in which tokens travel, and the capacity of buffers; None: one piece, nothing is dropped.
    gradient_share
        Factor of the experts' gradients, in which all ranks' losses have part.
    shared
        The stacks of weights that layers share; None: each layer has its own.

    Attributes
    ----------
    local
        The module that computes the experts in this rank's slots.
    loads
        Where the counts of forwards that train are summed up; None: nobody asks for them.
    condenser
        Condenser that lets some rows stand for others in `forward`; None: all travel.
    wire
        The form in which hidden vectors travel to other devices in `forward`; None: as they are.
    """

    loads: Loads | None
    condenser: Condenser | None
    wire: Wire | None

    def __init__(
        self,
        experts: nn.Module,
        placement: LayerPlacement,
        group: dist.ProcessGroup | None,
        *,
        chunks: Chunks | None = None,
        gradient_share: float = 1.0,
        shared: SharedStacks | None = None,
    ) -> None:
        super().__init__()
        self.placement, self.group, self.chunks = placement, group, chunks or Chunks.whole()
        self.local = experts
        self.weights, self.loads = Weights(experts, placement, gradient_share, shared), None
        self.condenser = self.wire = None
        self._count_held()
        self.sample = self.position = torch.zeros(0, dtype=torch.int64, device=placement.slot_of_expert.device)
        self._last = _Last()

    @property
    def held(self) -> list[int]:
        """The experts in this rank's slots, those that it owns first."""
        return self.placement.held

    @property
    def owned(self) -> list[int]:
        """The experts whose parameters and optimizer state are here."""
        return self.placement.owned

    @property
    def routed(self) -> RoutedTokens:
        """Experts that the last forward chose."""
        return self._last.routed

    @property
    def sent(self) -> Sent:
        """Routes and pairs of the last forward, not summed up yet."""
        return self._last.sent

    @property
    def traffic(self) -> Traffic:
        """Traffic and load of the last forward."""
        return self._last.sent.traffic

    def rebind(self, placement: LayerPlacement, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Hold the experts of another placement from the next forward on, as `rebind` of some layers."""
        rebind([(self, placement)], optimizer)

    def _count_held(self) -> None:
        if "num_experts" in vars(self.local):  # as those of transformers count them
            self.local.num_experts = len(self.held)  # type: ignore[assignment]

    def begin(self, sample_T: Tensor, position_T: Tensor) -> None:
        """Say which tokens the next forward is about, int64 `[T]`."""
        self.sample, self.position = sample_T, position_T

    @uncompiled
    def forward(self, x_TM: Tensor, ids_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """The weighted sum of each token's experts, ids 0 to E-1, `[T, M]`: tokens travel to them and return.

        A collective call.
        """
        self._refuse_other_turns()
        device_TK, fold = self.devices(ids_TK), None
        if self.condenser is not None:
            fold = self.condenser.fold(
                x_TM, ids_TK, weight_TK, device_TK, self.chunks, self.group, training=self.training
            )
        copies = self._copies(ids_TK, device_TK) if fold is None else fold.copies
        trip = Trip(copies, self.chunks, self.contributions, self.weights, self.group, wire=self.wire)
        if fold is None:
            y_nM = self._taken(trip, x_TM, weight_TK)
            with lap("combine"):
                return copies.summed(y_nM, len(x_TM))
        y_mM = self._taken(trip, fold.x, fold.weight, condensed=fold.condensed)
        with lap("combine"):
            return fold.spread(y_mM, len(x_TM))

    @uncompiled
    def carry(
        self,
        x_TM: Tensor,
        ids_TK: Tensor,
        weight_TK: Tensor,
        device_TK: Tensor,
        token_T: Tensor,
        norm: nn.Module,
        destination: Callable[[Tensor, Tensor], Tensor],
        *,
        stays: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Partial sums of `x + block(norm(x))` where tokens live from now on; a collective call, differentiable.

        What travels is x itself. Every device norms what it receives, and that of a token's first expert adds x to its
        part, so that the residual is carried once, exactly and with no traffic of its own.

        Parameters
        ----------
        device_TK
            Of each expert, as `devices` gives it.
        token_T
            Numbers below 2**31 by which tokens are known to all ranks.
        destination
            Where tokens live next, int64, by the device of their first expert and their number, both int32.
        stays
            Whether that is always the device that computes.

        Returns
        -------
        tuple
            Rows `[n, M]` to be summed by token, and the token of each, int64 `[n]`.
        """
        rank, top_k = dist.get_rank(self.group), ids_TK.shape[1]

        def compute(x_mM: Tensor, weight_mK: Tensor, beside: Tensor) -> Tensor:
            residual = x_mM.where((beside[:, top_k] == rank)[:, None], 0)
            return residual + self.contributions(norm(x_mM), weight_mK, beside[:, :top_k])

        piece_T = self._piece_of(ids_TK)
        copies = select(ids_TK, device_TK, piece_T, self._shape, torch.stack([device_TK[:, 0], token_T], dim=1))
        trip = Trip(
            copies,
            self.chunks,
            compute,
            self.weights,
            self.group,
            others=list(norm.parameters()) if torch.is_grad_enabled() else (),
            destination=lambda beside: destination(beside[:, top_k], beside[:, top_k + 1]),
            stays=stays,
        )
        y_nM = self._taken(trip, x_TM, weight_TK)
        assert trip.tag is not None
        return y_nM, trip.tag.long()

    def _taken(self, trip: Trip, x_TM: Tensor, weight_TK: Tensor, *, condensed: int = 0) -> Tensor:
        """Rows that a trip brings, which spares copies; `traffic` is then that of the trip."""
        self._last.pairs = 0
        y_nM = trip.take(x_TM, weight_TK)
        self._last.sent = trip.sent(self._last.pairs, condensed)
        if trip.recording and not in_backward():
            self._last.trips.add(trip)
        if self.loads is not None and y_nM.requires_grad:
            assert self._last.counts is not None
            y_nM.register_hook(functools.partial(self.loads.add, self._last.counts))  # type: ignore[no-untyped-call]
        return y_nM

    def _refuse_other_turns(self) -> None:
        """Refuse to run a forward again that another has followed: what it went by is known of the last alone."""
        turns = self.placement.rows is not None and self.placement.quota is None
        condenses = self.condenser is not None and self.condenser.reach
        if (turns or condenses) and self._last.waiting > 1 and in_backward():
            what = "a placement with replicas" if turns else "condensation"
            raise UsageError(
                f"two checkpointed forwards before one backward under {what}; run backward after each forward, or"
                " checkpoint around less than the routed block"
            )

    def devices(self, ids_TK: Tensor) -> Tensor:
        """The device of each of these tokens' experts, int64 `[T, K]`; a collective call where steps are split."""
        if len(self.sample) != len(ids_TK):  # nobody said which tokens they are
            self.begin(torch.zeros_like(ids_TK[:, 0]), torch.arange(len(ids_TK), device=ids_TK.device))
        self._last.routed = RoutedTokens(self.sample, self.position, ids_TK)
        if self.placement.quota is not None:
            device_TK, self._last.counts = self.placement.quota.choose(ids_TK)
            return device_TK
        return self.placement.replicas.choose(ids_TK, self.sample, self.position)

    def contributions(self, x_mM: Tensor, weight_mK: Tensor, ids_mK: Tensor) -> Tensor:
        """Partial sums that this rank's experts add to tokens, `[m, M]`; ids are -1 where another device computes."""
        slot_mK, pairs = self.placement.slot_of_expert[ids_mK], len(x_mM)
        with lap("experts"), self.weights.lent(), self._naming_types(x_mM):
            if ids_mK.shape[1] == 1 and self.chunks.capacity_factor is None:  # every row asks one expert, which is here
                y_mM = applied(self.local, x_mM, slot_mK, weight_mK)
            else:
                y_mM, pairs = partial_sums(self.local, x_mM, slot_mK, weight_mK)
        self._last.pairs += pairs
        return y_mM

    @contextlib.contextmanager
    def _naming_types(self, x: Tensor) -> Iterator[None]:
        """Raise, in place of torch's error about a product of two types, one that says where they come from."""
        try:
            yield
        except RuntimeError as error:
            types = {str(own.dtype): own.dtype for own in self.local.parameters()}
            if x.dtype in types.values() or torch.is_autocast_enabled(x.device.type):
                raise
            raise UsageError(
                f"tokens of {x.dtype} for experts of {', '.join(types)}; give both one type, or run the model under"
                " torch.autocast: FSDP2's MixedPrecisionPolicy casts none of its ignored_params"
            ) from error

    @property
    def _shape(self) -> tuple[int, int]:
        return self.chunks.num_pieces, dist.get_world_size(self.group)

    def _copies(self, ids_TK: Tensor, device_TK: Tensor) -> Copies:
        """The copies of tokens that return; buffers are cut along their capacity."""
        if self.chunks.capacity_factor is None:
            piece_T = self._piece_of(ids_TK)
            return select(ids_TK, device_TK, piece_T, self._shape)
        piece_C = self.chunks.piece_of(self._capacity(*ids_TK.shape), ids_TK.device)
        return select_buffers(ids_TK, device_TK, piece_C, self._shape, self.placement.slots)

    def _piece_of(self, ids_TK: Tensor) -> Tensor | None:
        """The piece of each token; None where there is one."""
        return None if self.chunks.num_pieces == 1 else self.chunks.piece_of(len(ids_TK), ids_TK.device)

    def _capacity(self, num_tokens: int, top_k: int) -> int:
        """Rows of every buffer: K int(F ceil(T / E)) as Tutel has it, T the tokens of the fullest rank, padded."""
        fullest = torch.tensor(num_tokens, device=self.placement.slot_of_expert.device)
        dist.all_reduce(fullest, dist.ReduceOp.MAX, self.group)
        assert self.chunks.capacity_factor is not None
        rows = top_k * int(self.chunks.capacity_factor * -(-int(fullest) // self.placement.num_experts))
        return self.chunks.padded(rows)


@naming_lost_ranks()
def rebind(
    changes: Sequence[tuple[ParallelExperts, LayerPlacement]],
    optimizer: torch.optim.Optimizer | None = None,
    moving: Moving | None = None,
) -> None:
    """Let layers hold the experts of other placements from the next forward on; a collective call between two steps.

    Replicas come with the weights that travel then, and take the memory of those that are held, no more. Experts that
    change their owner move with their gradients and their rows of the optimizer's state; parameters stay the same
    objects.

    Parameters
    ----------
    optimizer
        The one that has a state of the experts; None: there is none, as under plain SGD.
    moving
        What is on its way already of all owners that change.

    Raises
    ------
    UsageError
        A forward waits for its backward pass, or the optimizer's state is not by expert; nothing was changed.
    """
    if any(block._last.waiting for block, _ in changes):
        raise UsageError(
            "experts moved between a forward and its backward pass; move them after it, and let go of outputs that get"
            " none, or make them under torch.no_grad()"
        )
    for block, _ in changes:
        block.weights.collect()
    if moving is not None:
        moving.arrive(changes[0][0].group, optimizer)
    elif changes:
        move_experts([change_of(block, place.owner) for block, place in changes], changes[0][0].group, optimizer)
    for block, place in changes:
        block.weights.take(place)
        block.placement = place
        block._count_held()


def change_of(block: ParallelExperts, owner_E: Ints) -> Change:
    """The change of a layer's experts to other owners, int64 `[E]`."""
    return Change(block.weights, block.placement.owner, owner_E)
