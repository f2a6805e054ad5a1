"""`moeplan apply --checkpoint` and `--undo`: the weights of a model in a plan's order, and back."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .screen import GIGA, byte_progress, print_json

if TYPE_CHECKING:
    from ...runtime.checkpoints import Permuted
    from ...runtime.plan import Plan

__all__ = ["permute_checkpoint", "undo_checkpoint"]


def permute_checkpoint(plan_path: Path, checkpoint: Path, output: Path, *, as_json: bool) -> None:
    """Carry a plan into a checkpoint, and print what an engine makes of it."""
    from ...runtime.checkpoints import permute
    from ...runtime.plan import load

    plan = load(plan_path)
    with byte_progress() as update:
        result = permute(plan, checkpoint, output, on_progress=update)
    notes = _notes(plan, result)
    if as_json:
        print_json({"plan": str(plan_path)} | _plain(result) | {"notes": notes})
        return
    layers = f"{result.num_experts} experts of {len(result.layers)} layers in the plan's order"
    print(f"wrote     {output}    {result.num_files} files, {result.num_bytes / GIGA:.3g} GB: {layers}")
    for note in notes:
        print(f"note      {note}")
    print(f"undo      moeplan apply --undo {output} -o DIR")


def undo_checkpoint(directory: Path, output: Path, *, as_json: bool) -> None:
    """Give a permuted checkpoint its first order back."""
    from ...runtime.checkpoints import undo

    with byte_progress() as update:
        result = undo(directory, output, on_progress=update)
    if as_json:
        print_json(_plain(result))
        return
    print(f"wrote     {output}    {result.num_files} files, {result.num_bytes / GIGA:.3g} GB in their first order")
    if result.changed:
        names = ", ".join(result.changed[:3]) + (", ..." if len(result.changed) > 3 else "")
        print(f"note      {len(result.changed)} files are not what was permuted ({names}): trained or changed since")
    else:
        print("note      byte for byte what was permuted")


def _notes(plan: "Plan", result: "Permuted") -> list[str]:
    """Notes to read before the checkpoint is served, a line each."""
    num_devices = plan.cluster.num_devices
    notes = [
        f"start the engine with expert parallelism over {num_devices} ranks,"
        f" {result.num_experts // num_devices} experts"
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
    if result.left_alone:
        notes.append(f"left as they are, outside the plan: {', '.join(result.left_alone)}")
    if result.left_out:
        notes.append(f"not copied, weights in another form and the old order: {', '.join(result.left_out)}")
    return notes


def _plain(result: Any) -> dict[str, Any]:
    return asdict(result) | {"directory": str(result.directory)}
