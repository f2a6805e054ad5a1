"""`moeplan demo`: the whole chain on the embedded model."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .flags import Json
from .screen import console, print_json, progress


def demo(
    output: Annotated[Path, typer.Option("-o", "--output", help="A new folder for its files.")] = Path("moeplan-demo"),
    as_json: Json = False,
) -> None:
    """Profile this machine, record the embedded model, solve, apply, and run it on 4 processes under the plan.

    \b
    Example:
      moeplan demo -o moeplan-demo
    """
    from ..demo.job import run_demo
    from ..demo.report import demo_report
    from ..evaluate.metrics import COPIES, EXCHANGE, EXPERTS
    from ..report.plan import solve_report
    from ..report.profile import profile_report

    with progress() as say:
        done = run_demo(output, on_progress=say)
    if as_json:
        runs = []
        for run, one in zip(done.runs, done.replayed, strict=True):
            predicted = {
                name: (metric := one.metrics.get(name)) and metric.model_dump() for name in (EXCHANGE, EXPERTS)
            }
            runs.append(asdict(run) | {"replayed": one.metrics[COPIES].value, "predicted": predicted})
        print_json({"folder": str(output), "plan_sha256": done.plan.plan_sha256, "runs": runs})
        return
    screen = console()
    print("$ moeplan profile --quick                    (in its own folder)")
    profile_report(done.profile, output / "profile.json", screen)
    print("\n$ moeplan solve --strategy exflow")
    solve_report(done.plan, output / "plan.json", screen)
    print("\n$ moeplan apply plan.json")
    screen.print(done.certificate.summary(output / "plan.json", output / "traces"))
    demo_report(done, screen)
