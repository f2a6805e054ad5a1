"""Measuring: from a request to the Profile, on local ranks or in a launched world, and to its file.

A file is written beside what it replaces until it is whole, and resumed from there.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import MoeplanError, UsageError
from .cases import CASES, PLANNED
from .cases.case import Case
from .harness import Request, Step, measure_cases, terms
from .log import Log, check_asked, check_options
from .origin import GridName
from .profile import Profile, load, save
from .world import run_world
from .world.launch import found_launch

DEFAULT_CPU_RANKS = 4


@dataclass(frozen=True, slots=True)
class MeasuredFile:
    """A profile on its way to its file."""

    profile: Profile | None  #: None on ranks other than 0 of a launched world, which have nothing to save
    notes: tuple[str, ...]  #: What resuming meant, a sentence each


def measure(
    *,
    num_ranks: int | None = None,
    device: str = "auto",
    grid: GridName = "default",
    timeout_s: float = 120.0,
    on_progress: Callable[[Step], None] | None = None,
    on_profile: Callable[[Profile], None] | None = None,
    resume: Profile | None = None,
    cases: Sequence[Case] | None = None,
    host_of: Callable[[int], str] | None = None,
) -> Profile | None:
    """The profile of this machine, or of the world that torchrun or srun launched (then None on ranks other than 0).

    Parameters
    ----------
    num_ranks
        Local processes; by default 4 on CPU and one a GPU on CUDA. In a launched world, None or its size.
    device
        "cpu", "cuda", or "auto": cuda where there is a GPU.
    grid
        "full": all sizes in all dtypes; "default" and "quick": as many sizes as their time allows, in one dtype.
    timeout_s
        The longest silence before a rank counts as hung.
    on_progress
        Receives each size as it is measured.
    on_profile
        Receives, every 15 s, the profile so far: `complete` false, and no fits yet (they would disturb the ranks).
    resume
        An interrupted profile: what it lacks is measured (in a launched world, what rank 0's lacks).
    cases
        By default all of a full grid, else those that planning reads.
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
    cases = usual_cases(grid) if cases is None else cases
    if resume is not None and found_launch() is None:  # a launched world finds out together
        check_options(resume, grid, cases)
        if resume.complete:
            check_asked(resume, device, num_ranks)
            return resume
    place = _device(device)
    log = Log(cases, grid=grid, earlier=resume, on_progress=on_progress, on_profile=on_profile)
    complete = True
    try:
        run_world(
            _ranks(num_ranks, place),
            measure_cases,
            Request(tuple(cases), grid, frozenset(log.measured)),
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


def usual_cases(grid: GridName) -> tuple[Case, ...]:
    """All cases of a full grid, else those that planning reads."""
    return tuple(CASES.values()) if grid == "full" else PLANNED


def measure_file(
    output: Path,
    *,
    num_ranks: int | None = None,
    device: str = "auto",
    grid: GridName = "default",
    timeout_s: float = 120.0,
    resume: bool = False,
    on_progress: Callable[[Step], None] | None = None,
    also: Sequence[Case] = (),
) -> MeasuredFile:
    """Measure a profile for `output`, or what the profile in that file lacks; `save_measured` then puts it there.

    While it is measured, the profile so far is kept in `partial_path(output)`. An interrupted run is resumed from
    there, else from `output`; a complete profile is returned as it is.

    Parameters
    ----------
    num_ranks, device, grid, timeout_s, on_progress
        As `measure` takes them; it also tells what is raised.
    also
        Cases beside the usual ones.
    """
    earlier, notes = _earlier(output) if resume else (None, ())
    partial = partial_path(output)
    profile = measure(
        num_ranks=num_ranks,
        device=device,
        grid=grid,
        timeout_s=timeout_s,
        on_progress=on_progress,
        on_profile=lambda so_far: save(so_far, partial),
        resume=earlier,
        cases=(*usual_cases(grid), *also),
    )
    return MeasuredFile(profile, notes)


def save_measured(profile: Profile, output: Path) -> Path:
    """Save a measured profile, and return where: an incomplete one beside `output` if there is a file already.

    A file of the same profile stays as it is: plans name it by its hash.
    """
    if output.exists() and not profile.complete:
        save(profile, partial_path(output))
        return partial_path(output)
    if not output.exists() or _known(output) != profile:
        save(profile, output)
    partial_path(output).unlink(missing_ok=True)
    return output


def _known(path: Path) -> Profile | None:
    """The profile of a file; None where it holds none."""
    try:
        return load(path)
    except MoeplanError:
        return None


def partial_path(output: Path) -> Path:
    """The file beside `output` for a profile that is not whole."""
    return output.with_name(f"{output.name}.partial")


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


def _earlier(output: Path) -> tuple[Profile | None, tuple[str, ...]]:
    """The profile to resume, as rank 0 reads it, and a note about it."""
    launch = found_launch()
    if launch is not None and launch.rank > 0:
        return None, ()
    path = partial_path(output) if partial_path(output).exists() else output
    if not path.exists():
        return None, (f"{output} is not there yet: nothing to resume, everything was measured",)
    profile = load(path)
    if profile.complete:
        return profile, (f"{path} is complete: nothing to do",)
    sizes = sum(len(series.measurements) for series in profile.series.values())
    return profile, (f"resumed {path}: {sizes} sizes were there already",)
