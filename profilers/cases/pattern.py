"""Patterns of data that tell who sent what to whom and where each element lay."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MODULUS = 251  # the largest prime of a byte: neighbouring ranks and positions never look alike
NOWHERE = 255  # a byte of no pattern: what nothing was written to
WHOLE_MODULUS = 199  # integers that every dtype of a reduction holds exactly


def of_sender(sender: int, receiver: int, length: int, device: str) -> "Tensor":
    """The bytes one rank sends another, uint8 `[length]`."""
    import torch

    first = (31 * sender + 17 * receiver) % MODULUS
    ramp = torch.arange(MODULUS, device=device, dtype=torch.uint8)
    return ramp.repeat((first + length) // MODULUS + 1)[first : first + length]


def unlike(received: "Tensor", sender: int, receiver: int) -> str | None:
    """Number of received bytes that are not the sender's; None where all are."""
    wrong = int((received != of_sender(sender, receiver, len(received), str(received.device))).sum())
    return f"{wrong} of {len(received)} bytes from rank {sender} differ" if wrong else None


def share(rank: int, num_ranks: int, length: int, kind: "torch.dtype", device: str) -> "Tensor":
    """Contribution of a rank to a reduction, `[length]`: the elements i of the whole with i mod P its rank, else 0.

    Notes
    -----
    Each element comes from one rank, so that sums and maxima are the same small integers, exact in every dtype, in any
    order and for any number of ranks; every rank is missed where it is left out.
    """
    import torch

    position = torch.arange(length, device=device, dtype=torch.int32)
    return torch.where(position % num_ranks == rank, position % WHOLE_MODULUS + 1, 0).to(kind)


def unlike_whole(reduced: "Tensor", first: int = 0) -> str | None:
    """Number of elements that are not those of the whole from position `first` on; None where all are."""
    import torch

    position = torch.arange(first, first + len(reduced), device=reduced.device, dtype=torch.int32)
    wrong = int((reduced != (position % WHOLE_MODULUS + 1).to(reduced.dtype)).sum())
    return f"{wrong} of {len(reduced)} elements differ" if wrong else None
