"""What recording costs: process CPU time of a model's passes with and without it, in turn, in one process.

Run: python benchmarks/recording.py. CPU, one thread, expert ids only. A recorded run is whole: it opens the trace,
records its passes and closes it, so the writing of the Parquet parts counts. Least of several turns each; noise:
how far the least of other turns without recording is off.
"""

import gc
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import moeplan.traces
from moeplan.planner.demo.model import ModelConfig, MoELanguageModel
from moeplan.traces.model import ModelSpec
from moeplan.traces.reader import open_trace

MILLION = 1_000_000
REPEATS = 5


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
    Load("embedded (hidden 128), prefill", ModelConfig(), 16, 128, 8),
    Load("hidden 1024, prefill", WIDE, 16, 128, 2),
    Load("embedded, decoding 32 rows", ModelConfig(), 32, 1, 256),
    Load("hidden 1024, decoding 32 rows", WIDE, 32, 1, 64),
)


class Chooser(nn.Module):
    """A router that costs next to nothing, so that a million tokens are quickly through."""

    def __init__(self, ids: Tensor) -> None:
        super().__init__()
        self.ids = ids

    def forward(self, _: Tensor) -> Tensor:
        """The same ids `[T, K]` whatever it gets."""
        return self.ids


def cpu_s(run: Callable[[], None]) -> float:
    """Seconds of process CPU time."""
    gc.collect()
    start = time.process_time()
    run()
    return time.process_time() - start


def measure(load: Load, folder: Path) -> None:
    """Print a line."""
    torch.manual_seed(0)
    model = MoELanguageModel(load.config).eval()
    tokens_BS = torch.randint(256, (load.rows, load.columns))
    names = iter(range(10**6))

    def plain() -> None:
        for _ in range(load.passes):
            model(tokens_BS)

    def recorded() -> None:
        with moeplan.traces.record(model, folder / str(next(names))):
            plain()

    plain()
    recorded()
    turns = [(cpu_s(plain), cpu_s(recorded), cpu_s(plain)) for _ in range(REPEATS)]
    plain_s, recorded_s, again_s = (min(column) for column in zip(*turns, strict=True))
    extra_s, noise_s = recorded_s - plain_s, abs(again_s - plain_s)
    tokens, hooks = load.rows * load.columns * load.passes, load.passes * load.config.num_layers
    print(
        f"{load.name:<32} {load.rows * load.columns:>6,} {plain_s / load.passes * 1e3:>9.2f}"
        f" {extra_s / plain_s:>+8.1%} {noise_s / plain_s:>6.1%} {extra_s / hooks * 1e6:>8.1f}"
        f" {extra_s / tokens * 1e9:>9.0f}",
        flush=True,
    )


def resident_mib() -> float:
    """Memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def million(folder: Path) -> None:
    """Record a million tokens of 26 layers, top-6 of 64, and print the memory on the way."""
    layers, rows = 26, 4096
    model = nn.ModuleDict({f"router_{i}": Chooser(torch.rand(rows, 64).topk(6).indices) for i in range(layers)})
    model.forward = lambda x: [router(x) for router in model.values()]
    spec = ModelSpec(name="a million", layer_ids=tuple(range(layers)), num_experts=64, top_k=6)
    start = time.process_time()
    with moeplan.traces.record(model, folder / "million", pattern="router_.*", spec=spec):
        for index in range(MILLION // rows + 1):
            model(torch.empty(1, rows, 1))
            if index % 61 == 0:
                print(f"{index * rows:>9,} tokens  {resident_mib():>6.0f} MiB resident", flush=True)
    spent_s, trace = time.process_time() - start, open_trace(folder / "million")
    print(f"{trace.num_tokens:,} tokens of {layers} layers x top-6: {spent_s / trace.num_tokens * 1e9:.0f} ns a token")


def main() -> None:
    """Print a row a load, then the memory."""
    torch.set_num_threads(1)
    print(f"{'':<32} {'tokens':>6} {'ms a pass':>9} {'extra':>8} {'noise':>6} {'us/hook':>8} {'ns/token':>9}")
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        for load in LOADS:
            measure(load, Path(folder) / load.name)
        million(Path(folder))


if __name__ == "__main__":
    main()
