"""`moeplan report`: a plan as one page to show, or as a card."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ...errors import UsageError
from .flags import Json, optional
from .plans import recounted
from .screen import print_json, progress


def report(
    plan: Annotated[Path, typer.Argument(help="The plan.")] = Path("plan.json"),
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The page (.html), or a card of 1200x630 (.svg).")
    ] = Path("report.html"),
    trace: Annotated[str | None, optional("The trace it was made from; the plan's own.")] = None,
    profile: Annotated[str | None, optional("The profile it was made from; the plan's own.")] = None,
    as_json: Json = False,
) -> None:
    """Write a plan as one page that needs no network: its gain, loads, seconds, bytes, evidence, what to type next.

    Certifies the plan against its trace and profile as moeplan certify does, and draws what that counted. Without the
    trace the page has what the plan alone says.

    \b
    Examples:
      moeplan report plan.json
      moeplan report plan.json -o card.svg
    """
    from ...profilers.profile import load as load_profile
    from ...runtime.plan import load
    from ..document import check_page
    from ..report.page import PlanPage

    check_page(output, "; expected a page or a card", kinds=(".html", ".svg"))
    if output.resolve() == plan.resolve():
        raise UsageError(f"{output}: the plan itself, which its page would replace; give another -o")
    loaded = load(plan)
    recount = recounted(loaded, plan, trace, profile, keep=True)
    certificate = recount.certificate
    timed_by = None if certificate.profile is None else load_profile(certificate.profile)
    page = PlanPage(loaded, plan, recount, timed_by)
    with progress() as say:
        say("drawing")
        titles = page.write(output)
    if as_json:
        about = {"plan": str(plan), "output": str(output), "plan_sha256": loaded.plan_sha256, "sections": titles}
        print_json({**about, "left_out": page.left_out, "certificate": asdict(certificate)})
        return
    for line in page.left_out:
        print(line)
    print(f"wrote     {output}")
