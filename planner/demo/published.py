"""The first half of the demo: what to run a real model by on GPUs that one need not have.

The routing is the example that ships, the seconds are those of the preset, and `auto` chooses.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
    measured = on_cluster(load_preset(PRESET), CLUSTER, [LINK])
    profile.save(measured, hardware)

    def planned(name: str, strategy: str, progress: Callable[[str], None], **size: int) -> Plan:
        """A plan for steps of a size, saved under a name."""
        request = Request.of(strategy=strategy, trace=str(trace), cluster=measured.cluster, profile=hardware, **size)
        made = make(request, on_progress=progress)
        if made.interrupted:
            raise KeyboardInterrupt
        made.save(folder / name)
        return made.plan

    with ThreadPoolExecutor(1) as pool:
        decode = pool.submit(planned, "decode.json", "eplb", lambda _: None, concurrency=SEQUENCES)
        return planned("plan.json", "auto", say, tokens_per_step=TOKENS), decode.result()
