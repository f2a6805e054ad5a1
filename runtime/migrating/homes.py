"""Homes of a step's samples: where they are now, and where a layer's combine delivers them to (NetMoE).

The new ones are solved for while the layer's dispatch and experts go on.

Legend: B samples that started on this rank or, of counts, are on it now; I samples of all ranks; C samples now here,
ascending, or columns of counts; T tokens now here, by sample, then position; D devices; E experts.
"""

import math
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ...errors import UsageError
from ...profilers.cluster import Cluster
from ...profilers.exchanged import beside
from ...solvers.luffy import Attention, Law, first_homes
from ...solvers.rehoming import compile_rehoming, fault, rehome
from ..coherent.contexts import Contexts
from ..engine.gather import Gather
from ..engine.route import Route
from ..plan import Plan
from .predictor import Predictor, predictor_of


@dataclass(frozen=True, slots=True, eq=False)
class Guests:
    """The samples of a step and the ranks that they are on at one point of a forward, known to every rank."""

    contexts: Contexts
    #: The rank that each sample is on, int64 `[I]`; `home_on_device` is the same where the model computes
    home: NDArray[np.int64]
    home_on_device: Tensor
    token: Tensor  #: The numbers of the tokens here, int64 `[T]`
    #: here, lengths: the samples here, in 0..I-1, and their tokens, `[C]`
    here: list[int]
    lengths: list[int]

    @classmethod
    def of(cls, contexts: Contexts, home_I: NDArray[np.int64]) -> "Guests":
        """The samples at these homes."""
        rank, first = dist.get_rank(contexts.group), contexts.first
        home = torch.from_numpy(home_I).to(contexts.rank.device)
        token_T = (home[contexts.context] == rank).nonzero().flatten()
        here = np.flatnonzero(home_I == rank).tolist()
        return cls(contexts, home_I, home, token_T, here, [first[i + 1] - first[i] for i in here])

    def home_of(self, token: Tensor) -> Tensor:
        """The rank that tokens are on, int64, by their numbers."""
        return self.home_on_device[self.contexts.context[token]]

    def follow(self, rows: Tensor) -> Tensor:
        """Rows of the samples that started here, `[B, ...]` of any type, where they are: `[C, ...]`, ascending.

        A collective call outside autograd; all but B must be alike on all ranks.
        """
        rank, size = dist.get_rank(self.contexts.group), dist.get_world_size(self.contexts.group)
        to_B = self.home_on_device[self.contexts.rank == rank]
        from_C = self.contexts.rank[self.home_on_device == rank]
        if len(rows) != len(to_B):
            raise UsageError(f"{len(rows)} rows to follow the {len(to_B)} samples that the last forward took here")
        sent, received = ([ranks.bincount(minlength=size).tolist()] for ranks in (to_B, from_C))
        flat = rows.detach()[to_B.argsort(stable=True)].reshape(len(rows), math.prod(rows.shape[1:]))
        arrived = Route(sent, received, self.contexts.group).move(flat.view(torch.uint8))
        return arrived.view(rows.dtype).view(len(from_C), *rows.shape[1:])


def start_of(policy: "SamplePolicy", contexts: Contexts) -> NDArray[np.int64]:
    """The homes of samples before the first layer, int64 `[I]`: where they are given, unless attention counts."""
    given_I: NDArray[np.int64] = contexts.rank.cpu().numpy()
    if policy.law is None or not len(given_I):
        return given_I
    length_I = np.diff(contexts.first)
    attention = Attention(policy.law, length_I, length_I**2)
    return first_homes(policy.method, attention, given_I, policy.cluster.num_devices)


@dataclass(frozen=True, slots=True, eq=False)
class SamplePolicy:
    """A plan's sample policy, ready to be carried out."""

    method: str
    layers: frozenset[int]  #: The MoE layers whose combine delivers samples to new homes; after others they stay
    predictor: Predictor | None
    cluster: Cluster
    copy_bytes: int | None  #: Of a hidden vector; None where it is not known
    law: Law | None = None  #: Of attention, where it counts

    @classmethod
    def of(cls, plan: Plan, folder: Path | None) -> "SamplePolicy":
        """The policy of a plan that lies in `folder`, its predictor beside it.

        Raises
        ------
        UsageError
            An unknown method, or a predictor and no folder to look for it.
        InputError
            The predictor is not there, damaged, or not the plan's.
        """
        decided = plan.decisions.sample_policy
        assert decided is not None
        if wrong := fault(decided.method, decided.attention):
            raise UsageError(wrong)
        predictor = predictor_of(plan, folder)
        compile_rehoming(decided.method, decided.attention, plan.cluster)  # or the first step would wait for it
        return cls(
            decided.method,
            frozenset(decided.layers),
            predictor,
            plan.cluster,
            plan.model.copy_bytes,
            decided.attention,
        )


class Homes:
    """The new homes of a step's samples after one layer: every rank tells all others its counts, and solves alike.

    All ranks make it together, with the same layer and present homes.

    Parameters
    ----------
    copies_BD, pairs_BE
        Of each sample here, ascending: copies to every device, and token-expert pairs with every expert.
    home_I
        Where the samples are now.
    length_I
        Their tokens.

    Attributes
    ----------
    sent_bytes
        Bytes of counts that this rank sends to other devices.
    """

    def __init__(
        self,
        policy: SamplePolicy,
        layer: int,
        copies_BD: Tensor,
        pairs_BE: Tensor,
        home_I: NDArray[np.int64],
        length_I: NDArray[np.int64],
        group: dist.ProcessGroup | None,
    ) -> None:
        self.policy, self.layer, self.home, self.length = policy, layer, home_I, length_I
        rows_BC = torch.cat([copies_BD, pairs_BE], dim=1).to(torch.int32)
        held, size = np.bincount(home_I, minlength=policy.cluster.num_devices).tolist(), policy.cluster.num_devices
        self.sent_bytes = (size - 1) * rows_BC.numel() * rows_BC.element_size()
        self.counts = Gather.start(held, group, rows_BC)
        self._homes: Future[NDArray[np.int64]] = Future()
        beside(self._run, "moeplan-homes")

    def result(self) -> NDArray[np.int64]:
        """The home of every sample, int64 `[I]`, once it is found; what went wrong is raised here."""
        return self._homes.result()

    def _run(self) -> None:
        try:
            self._homes.set_result(self._solved())
        except Exception as error:  # noqa: BLE001  belongs to whoever asks for the result
            self._homes.set_exception(error)

    def _solved(self) -> NDArray[np.int64]:
        policy, size = self.policy, self.policy.cluster.num_devices
        counts_IC = self._gathered()
        if not len(counts_IC):
            return self.home
        copies_ID, pairs_IE = counts_IC[:, :size], counts_IC[:, size:]
        following_ID = None if policy.predictor is None else policy.predictor.copies(self.layer, pairs_IE)
        attention = None
        if policy.law is not None:
            attention = Attention(policy.law, self.length, self.length**2, follows=following_ID is not None)
        return rehome(
            policy.method,
            copies_ID,
            pairs_IE.sum(axis=1),
            policy.cluster,
            attention=attention,
            next_copies=following_ID,
            copy_bytes=policy.copy_bytes,
            bounded=False,
        ).device_of_sample

    def _gathered(self) -> NDArray[np.int64]:
        """The counts of all samples in order, int64 `[I, C]`."""
        sent = self.counts.sent  # kept until it is sent, which the stream that it was made in knows nothing of
        stream = torch.cuda.Stream(sent.device) if sent.is_cuda else None  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):  # of its own: the thread waits for the counts, not for the experts
            by_home_IC = self.counts.wait()[0].cpu().numpy()
        counts_IC = np.empty(by_home_IC.shape, np.int64)
        counts_IC[np.argsort(self.home, kind="stable")] = by_home_IC
        return counts_IC
