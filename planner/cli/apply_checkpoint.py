"""`moeplan apply --checkpoint` and `--undo`: the weights of a model in a plan's order, and back."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .screen import print_json, slow_lines

if TYPE_CHECKING:
    from ...runtime.checkpoints import Permuted
    from ...runtime.plan import Plan

__all__ = ["permute_checkpoint", "undo_checkpoint"]

GIGA = 1e9


def permute_checkpoint(plan_path: Path, checkpoint: Path, output: Path, *, as_json: bool) -> None:
    """Carry a plan into a checkpoint, and print what an engine makes of it."""
    from ...runtime.checkpoints import permute
    from ...runtime.plan import load

    plan = load(plan_path)
    with _bytes() as tell:
        made = permute(plan, checkpoint, output, on_progress=tell)
    notes = _notes(plan, made)
    if as_json:
        print_json({"plan": str(plan_path)} | _plain(made) | {"notes": notes})
        return
    layers = f"{made.num_experts} experts of {len(made.layers)} layers in the plan's order"
    print(f"wrote     {output}    {made.num_files} files, {made.num_bytes / GIGA:.3g} GB: {layers}")
    for note in notes:
        print(f"note      {note}")
    print(f"undo      moeplan apply --undo {output} -o DIR")


def undo_checkpoint(directory: Path, output: Path, *, as_json: bool) -> None:
    """Give a permuted checkpoint its first order back."""
    from ...runtime.checkpoints import undo

    with _bytes() as tell:
        made = undo(directory, output, on_progress=tell)
    if as_json:
        print_json(_plain(made))
        return
    print(f"wrote     {output}    {made.num_files} files, {made.num_bytes / GIGA:.3g} GB in their first order")
    if made.changed:
        names = ", ".join(made.changed[:3]) + (", ..." if len(made.changed) > 3 else "")
        print(f"note      {len(made.changed)} files are not what was permuted ({names}): trained or changed since")
    else:
        print("note      byte for byte what was permuted")


def _notes(plan: "Plan", made: "Permuted") -> list[str]:
    """Notes to read before the checkpoint is served, a line each."""
    num_devices = plan.cluster.num_devices
    notes = [
        f"start the engine with expert parallelism over {num_devices} ranks, {made.num_experts // num_devices} experts"
        " each in order of number; not under this plan in moeplan.runtime, which would move them again"
    ]
    if plan.dispatch_model != "standard":
        notes.append(
            f"the plan is for {plan.dispatch_model} dispatch; an engine's standard dispatch returns tokens home after"
            " each layer, so only balance and distinct devices count: see the plan's figures for standard"
        )
    if beside := [name.replace("_", " ") for name in plan.decisions.names if name != "placement"]:
        notes.append(f"a checkpoint carries the placement, not the plan's {' and '.join(beside)}")
    if plan.verdict is not None and plan.verdict.value == "none":
        notes.append("no benefit expected: the plan's own figures do not show one")
    if made.left_alone:
        notes.append(f"left as they are, outside the plan: {', '.join(made.left_alone)}")
    if made.left_out:
        notes.append(f"not copied, weights in another form and the old order: {', '.join(made.left_out)}")
    return notes


def _plain(made: Any) -> dict[str, Any]:
    return asdict(made) | {"directory": str(made.directory)}


@contextlib.contextmanager
def _bytes() -> Iterator[Callable[[int, int], None]]:
    """Yield what takes the bytes written and those in all: a bar in a terminal, elsewhere a line every ten seconds."""
    if not sys.stderr.isatty():
        say = slow_lines()
        yield lambda done, total: say(f"{done / GIGA:.1f} of {total / GIGA:.1f} GB written")
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=2) as bar:
        task = bar.add_task("")
        yield lambda done, total: bar.update(task, completed=done, total=total)
