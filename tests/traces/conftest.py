from dataclasses import replace
from pathlib import Path

import pytest

from moeplan.traces.reader import Trace, open_trace
from moeplan.traces.schema import TokenBatch
from moeplan.traces.writer import TraceWriter
from tests.traces.builders import META, MakeTrace


@pytest.fixture
def make_trace(tmp_path: Path) -> MakeTrace:
    """Write batches, each as a part of its own, and open them."""

    def make(*batches: TokenBatch, name: str = "trace", weights: bool = True, top_k: int = META.model.top_k) -> Trace:
        sized = META.model_copy(update={"model": replace(META.model, top_k=top_k)})
        with TraceWriter(tmp_path / name, sized, weights=weights) as writer:
            for batch in batches:
                writer.append(batch)
                writer.flush()
        return open_trace(tmp_path / name)

    return make
