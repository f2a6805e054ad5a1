import time
from typing import Any

import pytest
import torch.distributed as dist

from moeplan.profilers.world import World, run_world
from moeplan.runtime.engine.stopwatch import lap, stopwatch


def test_outside_a_stopwatch_a_lap_asks_for_no_process_group_and_costs_microseconds() -> None:
    start = time.perf_counter()
    for _ in range(1000):
        with lap("experts"):
            pass
    assert time.perf_counter() - start < 0.1


def test_a_lap_that_fails_is_not_counted_and_the_stopwatch_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "barrier", lambda: None)
    with pytest.raises(RuntimeError, match="broken"), stopwatch() as laps, lap("combine"):
        raise RuntimeError("broken")
    assert laps == {"dispatch": [], "experts": [], "combine": []}
    with lap("combine"):
        pass
    assert laps["combine"] == []


def late(world: World, _: Any) -> float:
    with stopwatch() as laps:
        time.sleep(0.3 * world.rank)
        with lap("dispatch"):
            pass
    return laps["dispatch"][0]


def test_waiting_for_a_rank_that_comes_late_is_not_counted() -> None:
    seconds = run_world(2, late, None, timeout_s=60.0)
    assert seconds is not None
    assert max(seconds) < 0.25
