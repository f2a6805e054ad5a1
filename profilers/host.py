"""What tells the host of a process from others."""

import socket
from pathlib import Path

__all__ = ["this_host"]

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def this_host(rank: int) -> str:  # noqa: ARG001  the host of the process that asks
    """The host's name and, on Linux, the number of its boot: containers of several nodes may share a name."""
    try:
        return f"{socket.gethostname()} {BOOT_ID.read_text().strip()}"
    except OSError:
        return socket.gethostname()
