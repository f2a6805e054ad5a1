"""Measuring: from a request to the Profile, on local ranks or in a launched world."""

import os
from collections.abc import Callable, Sequence

from ..errors import UsageError
from .cases import CASES
from .cases.case import Case
from .harness import Request, measure_cases, terms
from .log import Listeners, Log
from .profile import Profile
from .resume import check_asked, check_options
from .world import run_world
from .world.launch import found_launch

__all__ = ["DEFAULT_CPU_RANKS", "measure"]

DEFAULT_CPU_RANKS = 4


def measure(
    *,
    num_ranks: int | None = None,
    device: str = "auto",
    quick: bool = False,
    timeout_s: float = 120.0,
    listeners: Listeners = Listeners(),  # noqa: B008  frozen
    resume: Profile | None = None,
    cases: Sequence[Case] = tuple(CASES.values()),
    host_of: Callable[[int], str] | None = None,
) -> Profile | None:
    """The profile of this machine, or of the world that torchrun or srun launched (then None on ranks other than 0).

    Parameters
    ----------
    num_ranks
        Local processes; by default 4 on CPU and one a GPU on CUDA. In a launched world, None or its size.
    device
        "cpu", "cuda", or "auto": cuda where there is a GPU.
    timeout_s
        The longest silence before a rank counts as hung.
    listeners
        Callbacks for each size, and for the profile so far.
    resume
        An interrupted profile: what it lacks is measured (in a launched world, what rank 0's lacks).
    host_of
        For tests: see `run_world`.

    Returns
    -------
    Profile
        After Ctrl-C what was measured until then, with `complete` false.

    Raises
    ------
    KeyboardInterrupt
        Ctrl-C before anything was measured.
    RankError
        A rank died, hung or got a wrong answer; it is named.
    UsageError
        The ranks cannot be started, or are spread unevenly over hosts.
    MismatchError
        `resume` is of another environment, world, grid or version; or launched ranks disagree. The difference is named.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # below, a lost rank prints a page of C++ frames
    if resume is not None and found_launch() is None:  # a launched world finds out together
        check_options(resume, quick, cases)
        if resume.complete:
            check_asked(resume, device, num_ranks)
            return resume
    place = _device(device)
    log = Log(cases, quick, listeners, resume)
    complete = True
    try:
        run_world(
            _ranks(num_ranks, place),
            measure_cases,
            Request(tuple(cases), quick, frozenset(log.measured)),
            device=place,
            timeout_s=timeout_s,
            on_progress=log.receive,
            terms=terms,
            host_of=host_of,
        )
    except KeyboardInterrupt:
        if log.start is None or not log.measured:
            raise
        complete = False
    return None if log.start is None else log.profile(complete=complete)


def _device(device: str) -> str:
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"device {device!r}; expected auto, cpu or cuda")
    if device == "cpu":
        return device
    import torch

    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise UsageError(
            "device cuda, but PyTorch finds no GPU here; use --device cpu, or install a CUDA build of torch"
        )
    return "cuda" if has_gpu else "cpu"


def _ranks(num_ranks: int | None, device: str) -> int | None:
    if num_ranks is not None or found_launch() is not None:
        return num_ranks
    if device == "cpu":
        return DEFAULT_CPU_RANKS
    import torch

    return torch.cuda.device_count()
