"""`moeplan certify`: recompute what a plan claims."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .flags import Json, optional
from .screen import console, print_json, progress


def certify(
    plan: Annotated[Path, typer.Argument(help="The plan.")] = Path("plan.json"),
    trace: Annotated[str | None, optional("The trace it was made from; without: structure only.")] = None,
    profile: Annotated[str | None, optional("The profile it was made from; without: seconds unchecked.")] = None,
    as_json: Json = False,
) -> None:
    """Recompute what a plan claims by a replay of its trace, token by token; what it cannot, it lists.

    Exits with 5 when a figure differs and with 4 when the trace or the profile is another one.

    \b
    Example:
      moeplan certify plan.json --trace traces --profile profile.json
    """
    from ...runtime.plan import load
    from ..certify import certifiable_profile, certifiable_trace
    from ..certify import certify as check

    loaded = load(plan)
    with progress() as say:
        certificate = check(loaded, trace, profile, folder=plan.parent, on_progress=say)
    if as_json:
        print_json({"plan": str(plan), "trace": trace, "profile": profile} | asdict(certificate))
    else:
        console().print(certificate.summary(plan, trace))
        if trace is None and (own := certifiable_trace(loaded, plan.parent)) is not None:
            timed = certifiable_profile(loaded, plan.parent)
            print(f"next: moeplan certify {plan} --trace {own}{f' --profile {timed}' if timed else ''}")
