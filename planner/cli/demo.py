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
    """Plan a real model for GPUs that ship as a preset, then run a small one on 4 processes under three plans.

    \b
    Example:
      moeplan demo -o moeplan-demo
    """
    from ..demo.job import run_demo
    from ..demo.report import demo_report, exact
    from ..evaluate.metrics import COPIES, EXCHANGE, EXPERTS

    with progress() as say:
        done = run_demo(output, on_progress=say)
    if as_json:
        runs = []
        for run, one in zip(done.runs, done.replayed, strict=True):
            names = (COPIES, EXCHANGE, EXPERTS)
            predicted = {name: (metric := one.metrics.get(name)) and metric.model_dump() for name in names}
            runs.append(asdict(run) | {"predicted": predicted})
        plans = {"prefill": done.prefill, "decode": done.decode}
        verdicts = {name: plan.verdict and plan.verdict.model_dump() for name, plan in plans.items()}
        print_json({"folder": str(output), "verdicts": verdicts, "exact": exact(done), "runs": runs})
        return
    demo_report(done, console())
