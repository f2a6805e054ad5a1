"""Seconds of a layer whose experts have replicas: the rates, and the formulas that they enter."""

from typing import NamedTuple, Self

from ...profilers.cluster import Link

EXCHANGES = 4  # of a micro-batch: dispatch and combine, forward and backward


class Costs(NamedTuple):
    """Rates of one MoE layer in training; flat numbers, since compiled code takes them as they are.

    Notes
    -----
    With M micro-batches a step and n_e holders of expert e, a layer's seconds per step are

        sum_m [pair_s max_d load_d + 4 exchange] + sums + moves / steps                                         (1)
        exchange = max_c latency_c + copy_bytes s_per_byte_c max_d max(sent_cd, received_cd)                    (2)
        sums = max_c s_per_byte'_c max_d sum_{e on d} 2 gradient_bytes / n_e (other holders of e in class c)    (3)
        moves = max_c s_per_byte'_c max_d max(bytes sent, bytes received) + moves_s                             (4)

    over the link classes c, inside a node and between nodes, which work side by side; sent and received are in pairs.
    (3) is once a step, however many micro-batches: every holder sums one n-th of the rows, in rank order, and hands on
    the result; whether what comes back is the sum or, from an owner, the weights made of it, the bytes are the same.
    (4) is of the experts that a layer moves: from a holder of the same node where there is one, else from the one that
    has sent least. Who holds replicas changes at no price with `replicas_free`; then homes alone move.
    """

    pair_s: float  #: Of a token-expert pair, forward and backward, on the busiest device
    copy_bytes: float  #: Of a token's hidden vector
    intra_latency_s: float  #: Of one exchange
    intra_s_per_byte: float
    inter_latency_s: float
    inter_s_per_byte: float
    gradient_bytes: float  #: Of an expert
    intra_sum_s_per_byte: float  #: Of gradient sums and moves
    inter_sum_s_per_byte: float
    moved_bytes: float  #: Of an expert that moves: weights and optimizer state
    moves_s: float = 50e-6  #: Latency of the moves of a layer
    replicas_free: bool = True  #: Optimizer state lives with the owner alone: a new replica costs nothing beyond (3)

    @classmethod
    def of(
        cls,
        *,
        parameters: int,
        hidden: int,
        pair_s: float,
        intra: Link,
        inter: Link,
        intra_sum: Link | None = None,
        inter_sum: Link | None = None,
        width: int = 2,
        state_width: int = 16,
        replicas_free: bool = True,
    ) -> Self:
        """The costs of experts of so many `parameters` in a model of this `hidden` size.

        Parameters
        ----------
        intra, inter
            Links of the exchange; of sums and moves the same, unless they are given.
        width
            Bytes of an element, a hidden vector's or a gradient's.
        state_width
            Bytes that move per parameter.
        """
        intra_sum, inter_sum = intra_sum or intra, inter_sum or inter
        return cls(
            pair_s=pair_s,
            copy_bytes=float(width * hidden),
            intra_latency_s=intra.latency_s,
            intra_s_per_byte=intra.s_per_byte,
            inter_latency_s=inter.latency_s,
            inter_s_per_byte=inter.s_per_byte,
            gradient_bytes=float(width * parameters),
            intra_sum_s_per_byte=intra_sum.s_per_byte,
            inter_sum_s_per_byte=inter_sum.s_per_byte,
            moved_bytes=float(state_width * parameters),
            replicas_free=replicas_free,
        )
