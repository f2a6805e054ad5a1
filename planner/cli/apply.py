"""`moeplan apply`: certify a plan and make it the active plan, or write it for an engine or into a checkpoint."""

import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import NoBenefitError, UsageError
from .flags import ENGINES, Json, optional
from .plans import certified
from .rules import Rule, check_flags, exclusive
from .screen import byte_progress, console, end_interrupted, print_json

if TYPE_CHECKING:
    from ...runtime.checkpoints import Permuted
    from ...runtime.exports import Exported
    from ...runtime.plan import Plan

PLAN = Path("plan.json")
Told = tuple[dict[str, Any], list[str]]  # what was done, as JSON and as lines
COMMAND = "a command after --"
WAYS = ("--engine", "--checkpoint", "--undo")  # to write a directory
JUDGED = ("--trace", "--profile", "--hf-config")
NO_WAY = "-o DIRECTORY goes with --engine NAME, --checkpoint DIRECTORY or --undo DIRECTORY; give one"
NOT_WITH = "{flag} does not go with {other}; leave that out"
RULES = (
    exclusive(*WAYS),
    Rule(WAYS, "without", ("-o",), "{flag} writes a new directory; name it with -o DIRECTORY"),
    Rule(("-o",), "without", WAYS, NO_WAY),
    Rule(("--hf-config",), "without", WAYS, "--hf-config goes with --engine NAME; give that"),
    Rule(("--engine",), "with", (COMMAND,), NOT_WITH),
    Rule(("--checkpoint",), "with", (*JUDGED, COMMAND), NOT_WITH),
    Rule(("--undo",), "with", (*JUDGED, "--force", COMMAND), NOT_WITH),
    Rule(("PLAN",), "with", ("--undo",), "--undo needs no plan; leave {value} out"),
)


def apply(
    plan: Annotated[Path, typer.Argument(help="The plan.")] = PLAN,
    command: Annotated[
        list[str] | None, typer.Argument(help="After --: a command to start under the plan.", show_default=False)
    ] = None,
    trace: Annotated[str | None, optional("The trace to certify against; the plan's own.")] = None,
    profile: Annotated[str | None, optional("The profile to certify seconds by; the plan's own.")] = None,
    engine: Annotated[str | None, optional(f"Write this engine's files: {ENGINES}.")] = None,
    output: Annotated[Path | None, optional("Where they go: a new directory.", "-o", "--output")] = None,
    hf_config: Annotated[
        Path | None, optional("The model's config.json, for layers that the plan does not know.")
    ] = None,
    checkpoint: Annotated[
        Path | None, optional("Write this Hugging Face checkpoint with its experts in the plan's order.")
    ] = None,
    undo: Annotated[Path | None, optional("Write this permuted checkpoint in its first order.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Go on with a plan whose own figures show no benefit.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Certify a plan and make it this directory's active plan, which moeplan.runtime.load_plan() finds.

    Certifies against the plan's own trace and profile where they are still there with their hashes; without the
    trace the structure only, without the profile no seconds. A plan whose verdict is that no benefit is expected is
    refused with exit code 8, unless --force is given.

    With --engine it writes the files that carry the plan into a serving engine instead, prints the command that starts
    the engine with them, and leaves the active plan as it is: engines do not read that.

    With --checkpoint it writes the model itself with the experts of each layer in the plan's order, for engines and
    trainers that take no placement; --undo gives the first order back and needs no plan. Neither certifies (moeplan
    certify does) nor activates, and an interrupted one goes on when it is run again.

    \b
    Examples:
      moeplan apply plan.json --engine sglang -o placement --hf-config config.json
      moeplan apply plan.json --checkpoint Mixtral-8x7B -o Mixtral-8x7B-planned
      moeplan apply plan.json
      moeplan apply plan.json -- torchrun --nproc-per-node 4 generate.py
      moeplan apply --undo Mixtral-8x7B-planned -o Mixtral-8x7B
    """
    if undo is None:
        _check_named(command or ())
    given: dict[str, object] = {
        "--engine": engine,
        "--checkpoint": checkpoint,
        "--undo": undo,
        "-o": output,
        "--trace": trace,
    }
    given |= {"--profile": profile, "--hf-config": hf_config, "--force": force, COMMAND: command}
    check_flags(given | {"PLAN": plan != PLAN and plan}, RULES)
    if checkpoint is not None and output is not None:
        with _saying_what_is_kept():
            result, lines = _permuted(plan, checkpoint, output, force)
    elif undo is not None and output is not None:
        with _saying_what_is_kept():
            result, lines = _undone(undo, output)
    else:
        from ..report.next_step import after_apply

        if command and shutil.which(command[0]) is None:
            raise UsageError(f"{command[0]}: no such command; nothing was applied")
        loaded = _paying(plan, force, "activate" if engine is None else "write")
        carry_out = partial(_activated, loaded, plan)
        if engine is not None and output is not None:
            carry_out = partial(_written, loaded, _prepared(loaded, engine, output, hf_config), engine, output)
        result, lines = _certified(loaded, plan, trace, profile, carry_out)
        lines += [] if engine or command else [after_apply(loaded, plan)]
    if as_json:
        print_json(result)
    else:
        show: Callable[[str], None] = print if checkpoint or undo else console().print
        for line in lines:
            show(line)
        if engine is not None:  # a line to itself, to paste
            print("start", result["command"], sep="\n")
    if command:
        sys.stdout.flush()
        os.environ["MOEPLAN_PLAN"] = str(Path(result["active"]).resolve())
        os.execvp(command[0], command)  # noqa: S606


@contextlib.contextmanager
def _saying_what_is_kept() -> Iterator[None]:
    """End as Ctrl-C does, and say what a checkpoint that was being written keeps."""
    try:
        yield
    except KeyboardInterrupt as error:
        end_interrupted("; ".join(getattr(error, "__notes__", ())) or "nothing was changed")


def _check_named(command: Sequence[str]) -> None:
    """Refuse a command line that names no plan before `--`, where the command's first word would be the plan."""
    after = sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []
    if len(after) > len(command):
        raise UsageError(f"no plan is named before --; expected moeplan apply {PLAN} -- {shlex.join(after)}")


def _paying(path: Path, force: bool, verb: str) -> "Plan":
    """The plan of a file; one whose own verdict, with an interval, is that it does not pay is refused unless forced."""
    from ...runtime.plan import load
    from ..report.answer import answer
    from ..report.next_step import needs_force

    plan = load(path)
    if not force and needs_force(plan):
        raise NoBenefitError(f"{path}: {answer(plan)}; to {verb} it anyway, give --force")
    return plan


def _certified(
    loaded: "Plan", plan: Path, trace: str | None, profile: str | None, carry_out: Callable[[], Told]
) -> Told:
    """Certify a plan and carry it out: what that gave, and what was certified."""
    certificate = certified(loaded, plan, trace, profile)
    result, lines = carry_out()
    left = f"; {len(certificate.unchecked)} claims unchecked: moeplan certify" if certificate.replayed else ""
    against = {"plan": str(plan), "certified_against": certificate.trace}
    return against | result, [*lines, certificate.summary(plan) + left]


def _activated(loaded: "Plan", plan: Path) -> Told:
    """Make a plan the active one; its path."""
    from ...runtime.active import activate
    from ...runtime.migrating.predictor import predictor_of
    from ..report.answer import answer

    predictor_of(loaded, plan.parent)  # which the plan alone does not certify
    active = activate(plan)
    line = f"active    {active}    moeplan.runtime.load_plan() finds it from here downward"
    return {"active": str(active)}, [answer(loaded), line]


def _prepared(plan: "Plan", engine: str, output: Path, hf_config: Path | None) -> "Exported":
    """Files for an engine, not yet written; refuses a plan that the engine or config.json rule out."""
    from ...runtime.exports import prepared
    from ...traces.huggingface.config import read_config, spec_of_config

    if hf_config is None:
        return prepared(plan, engine, output)
    config, kind = spec_of_config(hf_config), read_config(hf_config)["model_type"]
    return prepared(plan, engine, output, config=config, model_type=kind)


def _written(plan: "Plan", exported: "Exported", engine: str, output: Path) -> Told:
    """Write files for an engine; the files and its start command."""
    from ...runtime.exports import ENGINES, write
    from ..report.answer import answer, carried, doubt, judged_for, split_words

    write(exported, output)
    rule, files, conditions = exported.replica_rule, list(exported.files), list(exported.conditions)
    gain = carried(plan, ENGINES[engine])
    lines = [*([gain] if gain else []), f"wrote     {output}    {', '.join(files)}"]
    if doubt(plan):
        lines.append(f"verdict   {answer(plan)}")
    if judged_for(plan) == "training" and not ENGINES[engine].trains:
        plans_for_it = f"moeplan solve --for serving --engine {engine} plans for it"
        lines.append(f"note      judged for training; {engine} serves: {plans_for_it}")
    if rule is not None and (judged_rule := plan.judged_by) is not None:
        judge = f"moeplan compare PLAN --replica-rule {rule}"
        row = " (the row at degree 1)" if plan.decisions.pipeline and "pipeline" not in ENGINES[engine].carries else ""
        judged = "" if rule == judged_rule else f", and the plan was judged by {judged_rule}: {judge} replays it{row}"
        lines.append(f"replicas  chosen by the rule {rule}{judged}")
        lines += [f"balance   {split}"] if (split := split_words(plan)) else []
    lines += [f"note      {condition}" for condition in conditions]
    directory = {"engine": engine, "directory": str(output), "files": files, "replica_rule": rule}
    return {**directory, "command": exported.command, "conditions": conditions}, lines


def _permuted(plan_path: Path, checkpoint: Path, output: Path, force: bool) -> Told:
    """Carry a plan into a checkpoint; its files, and notes for engines."""
    from ...runtime.checkpoints import permute
    from ..figures import bytes_text

    plan = _paying(plan_path, force, "write")
    with byte_progress() as update:
        result = permute(plan, checkpoint, output, on_progress=update)
    notes = _notes(plan, result)
    layers = f"{result.num_experts} experts of {len(result.layers)} layers in the plan's order"
    lines = [f"wrote     {output}    {result.num_files} files, {bytes_text(result.num_bytes)}: {layers}"]
    lines += [*(f"note      {note}" for note in notes), f"undo      moeplan apply --undo {output} -o DIR"]
    return {"plan": str(plan_path), **asdict(result), "directory": str(result.directory), "notes": notes}, lines


def _undone(directory: Path, output: Path) -> Told:
    """Give a checkpoint its first order back, and say whether its weights are unchanged."""
    from ...runtime.checkpoints import undo
    from ..figures import bytes_text

    with byte_progress() as update:
        result = undo(directory, output, on_progress=update)
    note = "byte for byte what was permuted"
    if result.changed:
        names = ", ".join(result.changed[:3]) + (", ..." if len(result.changed) > 3 else "")
        note = f"{len(result.changed)} files are not what was permuted ({names}): trained or changed since"
    wrote = f"wrote     {output}    {result.num_files} files, {bytes_text(result.num_bytes)} in their first order"
    return asdict(result) | {"directory": str(result.directory)}, [wrote, f"note      {note}"]


def _notes(plan: "Plan", result: "Permuted") -> list[str]:
    """Notes to read before the checkpoint is served, a line each."""
    from ..report.answer import answer, doubt

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
    if plan.decisions.wire is not None:
        notes.append(f"a checkpoint carries the placement, not the plan's {plan.decisions.wire} rows")
    if doubt(plan):
        notes.append(answer(plan))
    if result.left_alone:
        notes.append(f"left as they are, outside the plan: {', '.join(result.left_alone)}")
    if result.left_out:
        notes.append(f"not copied, weights in another form and the old order: {', '.join(result.left_out)}")
    return notes
