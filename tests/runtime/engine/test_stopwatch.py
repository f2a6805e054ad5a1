import time

import pytest
import torch.distributed as dist

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
