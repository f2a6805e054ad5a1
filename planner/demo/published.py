"""The first half of the demo: what to run a real model by on GPUs that one need not have.

The routing is the example that ships, the seconds are those of the preset, and `auto` chooses.
"""

from collections.abc import Callable
from pathlib import Path

from ...profilers import profile
from ...profilers.description import on_cluster
from ...profilers.presets import load_preset
from ...runtime.plan import Plan
from ...traces.examples import CLUSTER, write_example
from ..request import Request
from ..solve import make

EXAMPLE, PRESET, LINK = "gpt-oss-20b", "h200_sxm", "inter=50:5"
TOKENS, SEQUENCES = 16_384, 1_024  # of a step in prefill, and in decode


def plan_published(folder: Path, say: Callable[[str], None]) -> tuple[Plan, Plan]:
    """The plan for steps of prefill, and the one for steps of decode, with their files in a folder."""
    say(f"unpacking the routing of {EXAMPLE}")
    trace, hardware = folder / EXAMPLE, folder / f"{PRESET}.json"
    write_example(EXAMPLE, trace)
    measured, plans = on_cluster(load_preset(PRESET), CLUSTER, [LINK]), []
    profile.save(measured, hardware)
    for name, strategy, size in (
        ("plan.json", "auto", {"tokens_per_step": TOKENS}),
        ("decode.json", "eplb", {"concurrency": SEQUENCES}),
    ):
        request = Request.of(strategy=strategy, trace=str(trace), cluster=measured.cluster, profile=hardware, **size)
        made = make(request, on_progress=say)
        if made.interrupted:
            raise KeyboardInterrupt
        made.save(folder / name)
        plans.append(made.plan)
    return plans[0], plans[1]
