"""Commands that read a plan, or an engine's placement file, and change nothing: show, compare, certify, validate."""

import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import InputError, NoBenefitError, UsageError, printable
from ..request import ReplayRule
from .flags import (
    ENGINES,
    Concurrency,
    Json,
    Phases,
    SamplesPerStep,
    TokensPerStep,
    Verbose,
    Waterfill,
    optional,
    phases,
)
from .screen import console, print_json, progress

if TYPE_CHECKING:
    from ...runtime.plan import Plan
    from ..certify import Certificate, Recount

PAGE = "The comparison with pictures of loads, seconds and bytes as a page (.html)."
TIMELINE = "Draw this MoE layer, from 0: how its chunks overlap, or its balance while replicas follow the load."
OF_LAYER = re.compile(r"((?:hidden )?layer )(\d+)(: .*)", re.DOTALL)
PICTURE = "With --timeline: where it goes, a page (.html), or a Chrome trace (.json)."


def show(
    plan: Annotated[Path, typer.Argument(help="The plan.")] = Path("plan.json"),
    timeline: Annotated[int | None, optional(TIMELINE)] = None,
    output: Annotated[Path | None, optional(PICTURE, "-o", "--output")] = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Print a plan: its origin and its gain, with -v a picture of its placement; or a layer's timeline.

    \b
    Examples:
      moeplan show plan.json
      moeplan show plan.json --timeline 3 -o layer3.html
    """
    from ...runtime.plan import load
    from ..report.plan import show_report
    from ..strategies.registry import decided_by

    loaded, folder = load(plan), plan.parent
    drawing: Any = next(filter(None, (one.timeline for one in decided_by(loaded))), None)
    if timeline is not None and drawing is None:
        raise InputError(f"{plan}: no pipeline and no rebalancing to draw; expected a plan of pipemoe or flexmoe")
    if output is not None and timeline is None:
        raise UsageError(f"-o {output} without --timeline LAYER; the plan's page: moeplan report {plan} -o {output}")
    if timeline is not None and output is not None:
        drawing.write_timeline(loaded, timeline, output, folder)
    if as_json and timeline is not None:
        about = {"plan": str(plan), "layer": timeline, "seconds": drawing.BASIS, "output": output and str(output)}
        print_json({**about, "traceEvents": drawing.trace_events(loaded, timeline, folder)})
    elif as_json:
        print_json(loaded.model_dump(mode="json"))
    elif output is not None:
        print(f"wrote     {output}")
    elif timeline is None:
        show_report(loaded, plan, console(), verbose=verbose)
    else:
        screen = console()
        for line in drawing.timeline_picture(loaded, timeline, screen.width, folder):
            screen.print(line)


def compare(
    plans: Annotated[list[Path], typer.Argument(help="The plans; gains are against the first, too.")],
    trace: Annotated[str, typer.Option(help="A trace of their model: a directory, a file or a URI.")] = "traces",
    profile: Annotated[Path | None, optional("The profile; else profile.json, if there.")] = None,
    phase: Phases = None,
    tokens_per_step: TokensPerStep = None,
    concurrency: Concurrency = None,
    samples_per_step: SamplesPerStep = None,
    replica_rule: Annotated[
        ReplayRule | None, optional("Rule by which tokens choose a replica; each plan's own.")
    ] = None,
    waterfill: Waterfill = False,
    seed: Annotated[int, typer.Option(help="Seed of the intervals.", min=0)] = 0,
    output: Annotated[Path | None, optional(PAGE, "-o", "--output")] = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Evaluate plans side by side on a trace they were not made from, each against today and the first.

    Today is contiguous experts, one slot each, standard dispatch, whole layers, samples that stay. A plan pays where it
    gains 1 % or more over today, and the 95 % interval of the gain is above 0. (Samples that move must gain more than
    2 %, unless whole steps are timed.) Exit code 8: a plan does not pay, and stderr names it.

    \b
    Examples:
      moeplan compare plan.json --trace new-traces
      moeplan compare plan.json other.json --trace new-traces -o compared.html
      moeplan compare eplb.json --trace new-traces --replica-rule static
    """
    from ..compare import compare as compared
    from ..document import check_page
    from ..evaluate.step_size import size_of
    from ..report.compare import as_dict, compare_report, write_comparison
    from ..request import profile_for

    size = size_of(samples_per_step=samples_per_step, tokens_per_step=tokens_per_step, concurrency=concurrency)
    if output is not None:
        check_page(output, "; expected a page")
    with progress() as say:
        comparison = compared(
            plans,
            trace,
            profile=profile_for(profile),
            phases=phases(phase),
            size=size,
            replica_rule=replica_rule,
            waterfill=waterfill,
            keep=output is not None,
            seed=seed,
            on_progress=say,
        )
    if output is not None:
        write_comparison(comparison, output)
    if as_json:
        print_json(as_dict(comparison))
    else:
        compare_report(comparison, console(), verbose=verbose)
        if output is not None:
            print(f"wrote     {output}")
    if comparison.failing:
        names = ", ".join(comparison.failing)
        raise NoBenefitError(f"the trace {trace} shows no benefit of {names}; {comparison.advice}")


def certify(
    plan: Annotated[Path, typer.Argument(help="The plan.")] = Path("plan.json"),
    trace: Annotated[str | None, optional("The trace it was made from; the plan's own.")] = None,
    profile: Annotated[str | None, optional("The profile it was made from; the plan's own.")] = None,
    as_json: Json = False,
) -> None:
    """Recompute what a plan claims by a replay of its trace, token by token; what it cannot, it lists.

    The plan's own trace and profile are those that it names, where these are still there with their hashes; without
    the profile seconds are left unchecked. Exits with 0 only when figures were recomputed: with 3 when there is no
    trace to do so, and the structure alone was checked; with 5 when a figure differs; with 4 when the trace or the
    profile is another one.

    \b
    Examples:
      moeplan certify plan.json
      moeplan certify plan.json --trace traces --profile profile.json
    """
    from ...runtime.plan import load

    loaded = load(plan)
    certificate = certified(loaded, plan, trace, profile)
    if as_json:
        print_json({"plan": str(plan)} | asdict(certificate))
    else:
        console().print("\n".join([certificate.summary(plan), *certificate.details()]))
    if not certificate.replayed:
        raise InputError(f"{plan}: not certified: {certificate.lacking(loaded)}")


def certified(plan: "Plan", path: Path, trace: str | None, profile: str | None) -> "Certificate":
    """The certificate of a plan by a trace and a profile, else by its own where they are still there."""
    return recounted(plan, path, trace, profile).certificate


def recounted(plan: "Plan", path: Path, trace: str | None, profile: str | None, *, keep: bool = False) -> "Recount":
    """The recount of a plan, as `certified`; `keep` keeps its tallies."""
    from ..certify import certifiable_profile, certifiable_trace, recount

    trace, profile = trace or certifiable_trace(plan, path.parent), profile or certifiable_profile(plan, path.parent)
    with progress() as say:
        return recount(plan, trace, profile, folder=path.parent, keep=keep, on_progress=say)


def validate(
    file: Annotated[Path, typer.Argument(help="The file, or a directory that moeplan apply --engine wrote.")],
    engine: Annotated[str, typer.Option(help=f"Whose: {ENGINES}.")],
    hf_config: Annotated[Path, typer.Option(help="The config.json of the model that is served.")],
    ep_size: Annotated[int | None, optional("Expert-parallel devices.", min=1, max=65_536)] = None,
    redundant: Annotated[int | None, optional("Slots per layer beyond its experts.", min=0, max=2**31 - 1)] = None,
    as_json: Json = False,
) -> None:
    """Check anybody's placement file before an engine meets it; stricter than the engines are.

    One line for each finding, layers that share it together: lengths, missing layers, ids, experts left out or twice on
    a device, what does not divide. --json lists them layer by layer. Exits with 3 when there is one. Without --ep-size
    what needs the devices is not checked, without --redundant the first row says how many slots there are.

    \b
    Examples:
      moeplan validate placement --engine sglang \\
        --hf-config config.json --ep-size 32
    """
    from ...runtime.exports import Expected
    from ...runtime.exports import validate as findings_of
    from ...traces.huggingface.config import read_config, spec_of_config

    model, kind = spec_of_config(hf_config), read_config(hf_config)["model_type"]
    expected = Expected(model=model, model_type=kind, num_devices=ep_size, redundant=redundant)
    findings = [printable(finding) for finding in findings_of(file, engine, expected)]
    lines = _together(findings)
    if as_json:
        print_json({"file": str(file), "engine": engine, "findings": findings})
    elif findings:
        without = {f"--ep-size {ep_size}": replace(expected, num_devices=None)}
        without[f"--redundant {redundant}"] = replace(expected, redundant=None)
        for flag, rest in without.items():
            if rest != expected and not findings_of(file, engine, rest):
                print(f"is {flag} meant? without it the file is sound")
                del lines[1:]
                break
        else:
            if len(lines) < len(findings) and 2 * len(findings) > model.num_layers:
                sizes = f"{model.num_layers} MoE layers of {model.num_experts} experts"
                print(f"is {hf_config} the config.json of this file's model? it has {sizes}")
        print("\n".join(lines))
    else:
        unchecked = "" if ep_size else "; without --ep-size nothing that depends on the devices"
        print(f"{file} is sound for {engine}: {model.num_layers} MoE layers{unchecked}")
    if findings:
        raise InputError(
            f"{file}: {len(findings)} finding{'s' * (len(findings) > 1)} for {engine}, above; mend the file, or write"
            " it anew with moeplan apply"
        )


def _together(findings: Sequence[str]) -> list[str]:
    """The findings, with one line for layers that differ in their number alone."""
    from ...runtime.exports.engine import listed

    layers = dict[tuple[str, str], list[int]]()
    for finding in findings:
        kind, number, words = matched.groups() if (matched := OF_LAYER.match(finding)) else (finding, "", "")
        layers.setdefault((kind, words), []).extend([int(number)] if number else [])
    return [f"{kind}{listed(numbers)}{words}" if numbers else kind for (kind, words), numbers in layers.items()]
