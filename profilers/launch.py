"""A launch: the place of this process in a world that torchrun or srun started."""

import os
from dataclasses import dataclass

from ..errors import UsageError

__all__ = ["Launch", "found_launch"]


@dataclass(frozen=True, slots=True)
class Launch:
    """The rank of this process and the size of its world."""

    rank: int
    size: int


def found_launch() -> Launch | None:
    """The launch that the environment tells of; None where local ranks are to be started.

    Raises
    ------
    UsageError
        The environment tells of one, but not where rank 0 listens.
    """
    for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if rank not in os.environ or size not in os.environ:
            continue
        if rank == "SLURM_PROCID" and os.environ[size] == "1":
            continue  # an interactive shell or a batch script, not one task of several
        return _launch(rank, size)
    return None


def _launch(rank: str, size: str) -> Launch:
    """The launch in two variables of the environment."""
    told = os.environ[rank], os.environ[size]
    if not (told[0].isdecimal() and told[1].isdecimal() and int(told[0]) < int(told[1])):
        raise UsageError(f"{rank}={told[0]} and {size}={told[1]}; expected 0 <= {rank} < {size}")
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise UsageError(
            f"{rank} is set but {' and '.join(missing)} is not; export the address of rank 0 and a free port,"
            f" or unset {rank} to start local ranks"
        )
    return Launch(int(told[0]), int(told[1]))
