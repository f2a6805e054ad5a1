"""A trip: tokens out to their experts' devices and their partial sums on, in chunks that overlap, forward and backward.

All chunks are sent before the first is waited for, and each one's partial sums as soon as they are computed, so that
exchanges and experts overlap (PipeMoE). The backward pass does the same the other way with chunks of its own: the
forward records a graph for every piece, and a backward chunk takes some pieces.

Legend: T tokens; n copies sent; m copies received; K experts per token; G tags; M hidden size; P pieces; D devices.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ...profilers.stopwatch import lap
from ..wire import Wire
from .chunks import Chunks
from .copies import Copies
from .payload import Columns
from .route import Route, Shipment, joined
from .traffic import Sent
from .watch import naming_lost_ranks
from .weights import Gradients, Weights


class _Piece(NamedTuple):
    """A piece on the device that computes it: its inputs and its outputs."""

    x: Tensor
    weight: Tensor
    y: Tensor


class Trip:
    """A trip of the copies of a layer, which all ranks make together.

    Parameters
    ----------
    compute
        Partial sums `[m, M]` of received x `[m, M]`, gate weights `[m, K]` and what came beside, int32 `[m, K + G]`.
    weights
        Weights of the experts, which `compute` uses.
    others
        Further parameters that it uses.
    destination
        Where the partial sums of copies go, int64 `[n]` by what travels beside; None: back to the sender. It is asked
        once all chunks are on their way and the first is computed.
    stays
        Whether every destination is the device that computes, so that nothing is sent on; in inference only.
    wire
        The form in which hidden vectors, and their gradients, travel to other devices; None: as they are.
    """

    tag: Tensor | None  #: The last tag of each row that arrived, int32, where copies have a destination
    columns: Columns
    out: Route
    back: Route
    used: Sequence[Tensor]  #: What gradients are asked by: the stacks of weights, and the other parameters
    version: object  #: Of the weights

    def __init__(
        self,
        copies: Copies,
        chunks: Chunks,
        compute: Callable[[Tensor, Tensor, Tensor], Tensor],
        weights: Weights,
        group: dist.ProcessGroup | None,
        *,
        others: Sequence[nn.Parameter] = (),
        destination: Callable[[Tensor], Tensor] | None = None,
        stays: bool = False,
        wire: Wire | None = None,
    ) -> None:
        self.copies, self.chunks, self.compute, self.weights, self.group = copies, chunks, compute, weights, group
        self.others, self.destination, self.stays, self.wire = others, destination, stays, wire
        self.pieces: list[_Piece] = []
        self.put_off = weights.put_off

    def take(self, x_TM: Tensor, weight_TK: Tensor) -> Tensor:
        """The partial sums that arrive here, differentiable: in the order in which copies left where they return."""
        self.recording = False
        if torch.is_grad_enabled():
            tensors = (x_TM, weight_TK, *self.weights.owned, *self.others)
            self.recording = any(tensor.requires_grad for tensor in tensors)
        if not self.recording:  # spares the host autograd's time
            return self.forward(x_TM, weight_TK)
        y: Tensor = _Travel.apply(self, *tensors)  # type: ignore[no-untyped-call]
        return y

    @naming_lost_ranks()
    def forward(self, x_TM: Tensor, weight_TK: Tensor) -> Tensor:
        """The partial sums that arrive here."""
        self.shape = (len(weight_TK), weight_TK.shape[1])
        with lap("dispatch"):
            self.out, notes = Route.agree(self.copies.counts, self.group, self.weights.note)
            self.weights.agreed(notes)
        sent = [self._sent(x_TM, weight_TK, chunk) for chunk in self.chunks.forward]
        self.columns = sent[0].columns
        self.weights.arrive()
        if self.recording:
            self.used, self.version = [*self.weights.leaves, *self.others], self.weights.version
        partial_sums, moved = list[Sequence[Tensor]](), list[Shipment]()
        for number, chunk in enumerate(self.chunks.forward):
            pieces = [self._computed(*piece) for piece in sent.pop(0).wait()]  # what arrived is let go once computed
            if number == 0:  # as late as can be: whoever names destinations may still be at it
                self.back = self._onward()
            if self.stays:
                partial_sums += pieces
            else:
                with lap("combine") as timed:
                    moved.append(Shipment.send(self.back, chunk, pieces, wire=self.wire, waits=timed))
        partial_sums += [piece for shipment in moved for piece in shipment.wait()]
        if self.weights.following is not None:
            self.weights.following.advance()
        y, *tag = joined(partial_sums)
        self.tag = tag[0].flatten() if tag else None
        return y

    @naming_lost_ranks()
    def backward(self, grad: Tensor) -> tuple[list[Tensor], Gradients]:
        """The gradients by x and gate weights of tokens, and those by the parameters."""
        if not self.pieces:
            raise RuntimeError("backward through a routed block a second time; its graph is kept for one backward pass")
        self.weights.restore(self.version)
        back = self.back.reversed()
        sent = [
            Shipment.send(back, chunk, [[grad[back.rows(chunk)]]], wire=self.wire) for chunk in self.chunks.backward
        ]
        self.weights.arrive()
        sums: Gradients = [None] * len(self.used)
        returning = []
        for chunk in self.chunks.backward:
            pieces, arrived = self.pieces[chunk.start : chunk.stop], sent.pop(0).wait()
            gradients = [self._gradients(piece, y, sums) for piece, (y,) in zip(pieces, arrived, strict=True)]
            returning.append(Shipment.send(self.out.reversed(), chunk, gradients, wire=self.wire))
        self.pieces.clear()
        x_nM, weight_nK = joined([piece for shipment in returning for piece in shipment.wait()])
        inputs = [self.copies.summed(x_nM, self.shape[0]), self.copies.summed_weights(weight_nK, self.shape)]
        met = zip(sums, self.used, strict=True)
        totals = [_zeros(tensor) if total is None else total for total, tensor in met]
        count = len(totals) - len(self.others)
        return inputs, self.weights.settled(totals[:count], put_off=self.put_off) + totals[count:]

    def _sent(self, x_TM: Tensor, weight_TK: Tensor, chunk: range) -> Shipment:
        """Copies of a chunk on their way: x, gate weights, and what travels beside."""
        rows = self.out.rows(chunk)
        with lap("dispatch") as timed:
            kinds = self.copies.hidden(x_TM, rows), self.copies.weights(weight_TK, rows), self.copies.beside[rows]
            return Shipment.send(self.out, chunk, [kinds], wire=self.wire, waits=timed)

    def _computed(self, x: Tensor, weight: Tensor, beside: Tensor) -> list[Tensor]:
        """The partial sums of a piece, in the order in which they go on, with the last tag of each if need be."""
        if not self.recording:
            return self._ordered(self.compute(x, weight, beside), beside)
        # Checkpointing around the block must not unpack a piece's graph: it would run the whole block again.
        with torch.enable_grad(), saved_tensors_hooks(_as_is, _as_is):
            x, weight = (column.detach().requires_grad_() for column in (x, weight))
            y, *tag = self._ordered(self.compute(x, weight, beside), beside)
        self.pieces.append(_Piece(x, weight, y))
        return [y.detach(), *tag]

    def _ordered(self, y: Tensor, beside: Tensor) -> list[Tensor]:
        """The partial sums of a piece by where they go, each with its tag if it goes elsewhere than back."""
        if self.destination is None:
            return [y]
        if self.stays:
            return [y, beside[:, -1:]]
        order = self.destination(beside).argsort(stable=True)
        with lap("combine"):
            return [y[order], beside[order, -1:]]

    def _gradients(self, piece: _Piece, grad: Tensor, sums: Gradients) -> list[Tensor]:
        """The gradients by x and weight of a piece; those by parameters are added to `sums`."""
        if not piece.y.requires_grad:  # no row of the piece met an expert here
            return [torch.zeros_like(piece.x), torch.zeros_like(piece.weight)]
        trained = [number for number, tensor in enumerate(self.used) if tensor.requires_grad]
        inputs = [piece.x, piece.weight, *(self.used[number] for number in trained)]
        x, weight, *gradients = torch.autograd.grad(piece.y, inputs, grad, materialize_grads=True)
        for number, gradient in zip(trained, gradients, strict=True):
            total = sums[number]
            sums[number] = gradient.clone() if total is None else total.add_(gradient)
        return [x, weight]

    def _onward(self) -> Route:
        """The route of the partial sums; where they go elsewhere, each sender tells both ends what it causes."""
        if self.destination is None or self.stays:
            return self.out.reversed()
        copies, (num_pieces, num_devices) = self.copies, self.copies.counts.shape
        place_n = copies.place * num_devices + self.destination(copies.beside)
        count_PDD = place_n.bincount(minlength=num_pieces * num_devices**2).view(num_pieces, num_devices, num_devices)
        told_D2PD = torch.stack([count_PDD.transpose(0, 1), count_PDD.permute(2, 0, 1)], dim=1).contiguous()
        heard_D2PD = torch.empty_like(told_D2PD)
        with lap("combine"):
            dist.all_to_all_single(heard_D2PD, told_D2PD, group=self.group)
            sent_PD, received_PD = heard_D2PD.sum(0)
            return Route(sent_PD.tolist(), received_PD.tolist(), self.group)

    def sent(self, pairs: int, condensed: int = 0) -> Sent:
        """Routes of the forward pass, in which this rank computed so many token-expert pairs, and spared copies."""
        tag_bytes = 0 if self.destination is None else self.copies.beside.element_size()
        return Sent(self.out, None if self.stays else self.back, self.columns, tag_bytes, pairs, condensed)


class _Travel(torch.autograd.Function):
    """A trip as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, trip: Trip, x_TM: Tensor, weight_TK: Tensor, *_parameters: Tensor) -> Tensor:
        ctx.trip = trip
        # What arrived may be held by the exchange's own thread for a while yet; the graph must not be held with it.
        return trip.forward(x_TM, weight_TK).detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, parameters = ctx.trip.backward(grads[0])
        return None, *inputs, *parameters


def _zeros(used: Tensor) -> Tensor | None:
    """The gradient of a parameter that no row met; None of a frozen one."""
    return torch.zeros_like(used) if used.requires_grad else None


def _as_is(tensor: Tensor) -> Tensor:
    return tensor
