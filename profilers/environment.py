"""The environment that figures were measured in: without it they mean nothing."""

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import ClassVar, Self

from ..errors import InputError

__all__ = ["Environment"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The machine and software of rank 0; None where there is no such part.

    Parameters
    ----------
    device
        The device's name; on CPU the processor's.
    driver, nccl
        Versions of the GPU driver and of NCCL.
    cpus, threads
        Processors this process may run on, and threads of a rank.
    """

    device: str
    backend: str
    torch: str
    driver: str | None
    nccl: str | None
    cpu: str
    cpus: int
    threads: int
    num_ranks: int
    num_hosts: int
    python: str
    system: str

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        if not "".join(text for text in astuple(self) if isinstance(text, str)).isprintable():
            raise InputError("environment with text that does not print; expected names and versions")

    @classmethod
    def of(cls, device: str, hosts: Sequence[str]) -> Self:
        """The environment of the rank that asks, which computes on "cpu" or "cuda:i", in a world on these hosts."""
        import torch

        cuda = device != "cpu"
        cpu = _first(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo")) or platform.processor() or platform.machine()
        return cls(
            device=torch.cuda.get_device_name(torch.device(device)) if cuda else cpu,
            backend="nccl" if cuda else "gloo",
            torch=torch.__version__,
            driver=_first(r"Kernel Module\D*([\d.]+)", Path("/proc/driver/nvidia/version")) if cuda else None,
            nccl=".".join(map(str, torch.cuda.nccl.version())) if cuda else None,  # type: ignore[no-untyped-call]
            cpu=cpu,
            cpus=len(os.sched_getaffinity(0)),
            threads=torch.get_num_threads(),
            num_ranks=len(hosts),
            num_hosts=len(set(hosts)),
            python=platform.python_version(),
            system=f"{platform.system()} {platform.release()}",
        )


def _first(pattern: str, path: Path) -> str | None:
    """The first match of a pattern in a file of the system."""
    try:
        match = re.search(pattern, path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return match[1].strip() if match else None
