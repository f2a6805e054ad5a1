"""The file of a profile that is measured: written beside what it replaces until it is whole, and resumed from there."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .harness import Step
from .log import Listeners
from .measure import measure
from .profile import Profile, load, save
from .world.launch import found_launch

__all__ = ["MeasuredFile", "measure_file", "partial_path", "save_measured"]


@dataclass(frozen=True, slots=True)
class MeasuredFile:
    """A profile on its way to its file.

    Parameters
    ----------
    profile
        None on ranks other than 0 of a launched world, which have nothing to save.
    notes
        What resuming meant, a sentence each.
    """

    profile: Profile | None
    notes: tuple[str, ...]


def measure_file(
    output: Path,
    *,
    num_ranks: int | None = None,
    device: str = "auto",
    quick: bool = False,
    timeout_s: float = 120.0,
    resume: bool = False,
    on_progress: Callable[[Step], None] | None = None,
) -> MeasuredFile:
    """Measure a profile for `output`, or what the profile in that file lacks; `save_measured` then puts it there.

    While it is measured, the profile so far is kept in `partial_path(output)`. An interrupted run is resumed from
    there, else from `output`; a complete profile is returned as it is.

    Parameters
    ----------
    num_ranks, device, quick, timeout_s, on_progress
        As `measure` takes them; it also tells what is raised.
    """
    earlier, notes = _earlier(output) if resume else (None, ())
    partial = partial_path(output)
    profile = measure(
        num_ranks=num_ranks,
        device=device,
        quick=quick,
        timeout_s=timeout_s,
        listeners=Listeners(on_progress=on_progress, on_profile=lambda so_far: save(so_far, partial)),
        resume=earlier,
    )
    return MeasuredFile(profile, notes)


def save_measured(profile: Profile, output: Path) -> Path:
    """Save a measured profile, and return where: an incomplete one beside `output` if there is a file already."""
    if output.exists() and not profile.complete:
        save(profile, partial_path(output))
        return partial_path(output)
    save(profile, output)
    partial_path(output).unlink(missing_ok=True)
    return output


def partial_path(output: Path) -> Path:
    """The file beside `output` for a profile that is not whole."""
    return output.with_name(f"{output.name}.partial")


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
