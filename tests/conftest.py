"""What tests of all rooms share: where the real data is, and traces made of random tokens."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

import moeplan  # noqa: F401  the installed one, before the clone's own folder can be found under that name
from moeplan.traces.model import Attention
from moeplan.traces.reader import Trace, open_trace
from moeplan.traces.schema import TokenBatch
from moeplan.traces.writer import TraceWriter
from tests.builders import meta_of, model
from tests.precompile import compiled_code

# Before numba is imported, which reads it; for the processes that tests start, too.
os.environ.setdefault("NUMBA_CACHE_DIR", compiled_code())

# A shell's `&` leaves Ctrl-C ignored, in every child too; tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Machines are noisy; a gate tries the same examples every time.
settings.register_profile("moeplan", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("moeplan")

MakeTrace = Callable[..., Trace]

# Files that take a minute or so begin first, so that no worker waits for one of them at the end.
LONGEST = (
    "test_chain",
    "test_guides",
    "test_demo_job",
    "test_migrating",
    "test_watch",
    "test_examples",
    "test_trainer",
    "test_certify_pipeline",
    "test_certify",
    "test_golden",
    "test_launch",
    "test_ranks",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real traces and measurements; its absence skips the test, visibly."""
    folder = Path(os.environ.get("MOEPLAN_DATA") or Path(__file__).parents[2] / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"real data absent: {folder} (set MOEPLAN_DATA)")
    return folder


@pytest.fixture(scope="session")
def gpt_oss(real_data: Path) -> Path:
    """The recorded routing of gpt-oss-20b."""
    path = real_data / "gpt-oss-20b" / "routing.npz"
    if not path.is_file():
        pytest.skip(f"real routing absent: {path}")
    return path


@pytest.fixture(scope="session")
def make_trace(tmp_path_factory: pytest.TempPathFactory) -> MakeTrace:
    """Write a trace of random tokens, whose experts follow a random cyclic shift of those of the layer before."""

    def make(
        *,
        samples: int = 24,
        tokens: int = 10,
        layers: int = 3,
        experts: int = 8,
        top_k: int = 2,
        seed: int = 0,
        unrouted: float = 0.0,
        columns: tuple[str, ...] = ("sample",),
        ranks: int = 1,
    ) -> Trace:
        rng, total = np.random.default_rng(seed), samples * tokens
        ids = np.empty((total, layers, top_k), dtype=np.uint16)
        first = rng.integers(experts, size=total)
        for layer in range(layers):
            noise = rng.integers(experts, size=total)
            first = np.where(rng.random(total) < 0.7, (first * 3 + layer) % experts, noise)
            ids[:, layer] = (first[:, None] + np.arange(top_k)) % experts
        ids[rng.random(ids.shape) < unrouted] = 65_535
        sample = np.repeat(np.arange(samples, dtype=np.int64) * 7, tokens)
        batch = TokenBatch(
            step=(sample // 21).astype(np.int32) if "step" in columns else None,
            sample=sample if "sample" in columns else None,
            position=np.tile(np.arange(tokens, dtype=np.int32), samples),
            source_rank=(sample % ranks).astype(np.int32) if "source_rank" in columns else None,
            phase=np.zeros(total, dtype=np.int8),
            ids=ids,
        )
        sizes = {"hidden_size": 64, "dtype_bytes": 2, "attention": Attention(kv_size=16)}
        folder = tmp_path_factory.mktemp("trace")
        with TraceWriter(folder, meta_of(model(layers, experts, top_k, name="random", **sizes))) as writer:
            writer.append(batch)
        return open_trace(folder)

    return make
