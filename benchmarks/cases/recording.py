"""What recording costs: process CPU time of a model's passes with and without it, in turn, in one process.

CPU, one thread, expert ids only. A recorded run is whole: it opens the trace, records its passes and closes it, so the
writing of the Parquet parts counts.
"""

import itertools
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import moeplan.traces
from moeplan.planner.demo.model import ModelConfig, MoELanguageModel
from moeplan.traces.model import ModelSpec
from moeplan.traces.reader import open_trace

from ..race import Call, race
from ..study import Row, Study

ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Load:
    """A model and how it is called."""

    name: str
    config: ModelConfig
    rows: int
    columns: int
    passes: int


WIDE = ModelConfig(num_layers=2, num_experts=16, top_k=2, hidden_size=1024, ffn_size=256, num_heads=8, num_kv_heads=2)
LOADS = (
    Load("hidden 128, prefill", ModelConfig(), 16, 128, 8),
    Load("hidden 1024, prefill", WIDE, 16, 128, 2),
    Load("hidden 128, decode", ModelConfig(), 32, 1, 256),
    Load("hidden 1024, decode", WIDE, 32, 1, 64),
)


class Chooser(nn.Module):
    """A router that costs next to nothing, so that a million tokens are quickly through."""

    def __init__(self, ids: Tensor) -> None:
        super().__init__()
        self.ids = ids

    def forward(self, _: Tensor) -> Tensor:
        """The same ids `[T, K]` whatever it gets."""
        return self.ids


@torch.inference_mode()
def _passes(load: Load) -> Iterator[Row]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, names = MoELanguageModel(load.config).eval(), itertools.count()
    tokens_BS = torch.randint(256, (load.rows, load.columns))

    def plain() -> None:
        for _ in range(load.passes):
            model(tokens_BS)

    with tempfile.TemporaryDirectory() as folder:

        def recorded() -> None:
            with moeplan.traces.record(model, Path(folder, str(next(names)))):
                plain()

        calls: dict[str, Call] = {"plain": plain, "recorded": recorded, "plain again": plain}
        timings = race(calls, "plain", rounds=ROUNDS, memory=False)
    least_s, hooks = timings["plain"].least_s, load.passes * load.config.num_layers
    for method, timing in timings.items():
        extra_s = timing.least_s - least_s
        more = {"us a hook": extra_s / hooks * 1e6}
        yield Row(load.name, method, quality=extra_s / least_s, more=more, **timing.figures)


@torch.inference_mode()
def _million(tokens: int) -> Iterator[Row]:
    """Tokens of 26 layers, top-6 of 64; the memory of the process on the way."""
    layers, rows = 26, 4096
    model = nn.ModuleDict({f"router_{i}": Chooser(torch.rand(rows, 64).topk(6).indices) for i in range(layers)})
    model.forward = lambda x: [router(x) for router in model.values()]
    spec = ModelSpec(name="a million", layer_ids=tuple(range(layers)), num_experts=64, top_k=6)
    with tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        with moeplan.traces.record(model, Path(folder, "trace"), pattern="router_.*", spec=spec):
            for index in range(1, tokens // rows + 2):
                model(torch.empty(1, rows, 1))
                if index % 61 == 0:
                    yield Row(f"{index * rows:,} tokens", "recording", memory_bytes=_resident_bytes())
        spent_s, found = time.process_time() - start, open_trace(Path(folder, "trace")).num_tokens
    yield Row(f"{found:,} tokens", "recorded", seconds=spent_s, memory_bytes=_resident_bytes())


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


STUDIES = (
    Study(
        title="Passes of a model with and without recording",
        quality="extra CPU time, %",
        baseline="plain",
        note="Seconds are CPU time of the process; extra: least of several rounds against the least without recording."
        " `plain again` shows the noise.",
        instances=lambda settings: LOADS[: 1 if settings.quick else None],
        rows=_passes,
    ),
    Study(
        title="A million tokens",
        quality="none",
        note="26 layers, top-6. MB: resident memory of the process, which must not grow with tokens; CPU seconds.",
        instances=lambda settings: [300_000 if settings.quick else 1_000_000],
        rows=_million,
    ),
)
