"""Draw docs/pictures/*.svg of the ExFlow page: real routing placed, and two searches second by second.

Run: python -m docs.draw [--seconds S] [--data FOLDER]

Legend: W transitions `[L-1, E, E]`; D devices.
"""

import argparse
import itertools
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from benchmarks.cases.exflow.trail import Trail, annealed, swept
from benchmarks.exflow_reference import FILE, instance
from benchmarks.growth import STYLES
from benchmarks.routing import GPT_OSS, gpt_oss
from benchmarks.study import DEFAULT_DATA
from moeplan.errors import InputError
from moeplan.planner.figures import percent
from moeplan.profilers.cluster import Cluster
from moeplan.solvers import contiguous
from moeplan.solvers.bounds import kept_bound
from moeplan.solvers.cost import hops_kept
from moeplan.solvers.placement import Placement

Array = np.ndarray
FOLDER = Path(__file__).with_name("pictures")
DEVICES, SEEDS = 8, 3
RANDOM, SEED = "24x64x16", 4
BLUE, RED, GREEN = (color for color, _ in STYLES[:3])
GREY = "0.35"
MOST = 0.99  # of the cells have a colour of their own, the others the darkest


@dataclass(frozen=True, slots=True)
class Placed:
    """Real routing, fitted on the even samples, and what was found for it by each search."""

    fit: Array
    unseen: Array
    sweeps: Trail
    annealing: list[Trail]

    @classmethod
    def of(cls, data: Path, seconds: float) -> "Placed":
        """With annealing of so many seconds of time limit."""
        if not (data / GPT_OSS).exists():
            raise InputError(f"no {GPT_OSS} in {data}; expected the recorded routing there: name its folder by --data")
        routing = gpt_oss(data)
        even = routing.even()
        fit, unseen = routing.transitions(even), routing.transitions(~even)
        return cls(fit, unseen, swept(fit, DEVICES), [annealed(fit, DEVICES, seconds, seed) for seed in range(SEEDS)])

    @property
    def plain(self) -> Placement:
        """Experts in their own order."""
        num_cuts, num_experts, _ = self.fit.shape
        return contiguous.solve(num_cuts + 1, num_experts, Cluster(1, DEVICES)).placement

    @property
    def plan(self) -> Placement:
        """Annealing's, of the first seed."""
        return self.annealing[0].placement


def main() -> int:
    """Draw all pictures; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of time limit, a search")
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help="real data; ../shared/data by default")
    options = parser.parse_args()
    if not 0 < options.seconds < math.inf:
        parser.error(f"--seconds {options.seconds}; expected more than 0")
    try:
        placed = Placed.of(options.data, options.seconds)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    FOLDER.mkdir(exist_ok=True)
    with mpl.rc_context({"svg.hashsalt": "moeplan", "svg.fonttype": "none", "font.size": 9}):
        _save(heat_map(placed), "heatmap")
        _save(by_layer(placed), "layers")
        _save(anytime(placed, options.seconds), "anytime")
    return 0


def heat_map(placed: Placed) -> Figure:
    """Transitions between experts by device, of unseen samples, in the layer pair with the plan's median share."""
    shares = _shares(placed.unseen, placed.plan)
    cut = int(np.argsort(shares)[len(shares) // 2])
    going = placed.unseen[cut] / placed.unseen[cut].sum()
    norm = PowerNorm(0.5, 0, float(np.quantile(going, MOST)))
    figure = Figure(figsize=(8.4, 4.3), layout="constrained")
    panels = figure.subplots(1, 2)
    for panel, title, placement in zip(panels, ("contiguous", "plan"), (placed.plain, placed.plan), strict=True):
        here, there = (np.argsort(placement.holds(layer).argmax(axis=1), kind="stable") for layer in (cut, cut + 1))
        image = panel.imshow(going[np.ix_(here, there)], cmap="Blues", norm=norm)
        edges = np.arange(0, len(going) + 1, len(going) // DEVICES) - 0.5
        for first, last in itertools.pairwise(edges):
            panel.plot([first, last, last, first, first], [first, first, last, last, first], color=RED, clip_on=False)
        centres = (edges[:-1] + edges[1:]) / 2
        panel.set(xticks=centres, xticklabels=range(DEVICES), yticks=centres, yticklabels=range(DEVICES))
        panel.tick_params(length=0)
        kept = _shares(placed.unseen, placement)[cut]
        panel.set(title=f"{title}: {percent(kept)} stay", xlabel=f"MoE layer {cut + 1}, experts by device")
    panels[0].set_ylabel(f"MoE layer {cut}, experts by device")
    bar = figure.colorbar(image, ax=panels, shrink=0.85, format=PercentFormatter(1, 1, " %"), extend="max")
    bar.set_label("of the transitions between the two layers")
    return figure


def by_layer(placed: Placed) -> Figure:
    """What stays on its device, layer pair by layer pair, of the fitted samples and of the others."""
    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    lines = {
        "plan": (placed.plan, BLUE, "-"),
        "sweeps": (placed.sweeps.placement, RED, ":"),
        "contiguous": (placed.plain, GREEN, "-"),
    }
    for panel, title, weights in zip(panels, ("fitted", "unseen"), (placed.fit, placed.unseen), strict=True):
        if weights is placed.fit:
            slots = np.full(DEVICES, weights.shape[1] // DEVICES)
            bound = np.array([kept_bound(one[None], slots).value for one in weights])
            panel.plot(
                bound / weights.sum(axis=(1, 2)),
                color=GREY,
                linestyle="--",
                linewidth=1.2,
                label=f"simple bound: {percent(bound.sum() / weights.sum(), 1)}",
            )
        for name, (placement, color, line) in lines.items():
            label = f"{name}: {percent(_kept(weights, placement), 1)}"
            panel.plot(_shares(weights, placement), color=color, linestyle=line, linewidth=1.8, label=label)
        panel.set(title=f"{title} samples", xlabel="from MoE layer")
        panel.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")
        _dress(panel)
    panels[0].set(ylabel="transitions that stay on their device", ylim=(0, 1.12), yticks=np.arange(0, 1.1, 0.2))
    return figure


def anytime(placed: Placed, seconds: float) -> Figure:
    """What searches keep after so many CPU seconds: real routing, and a random instance whose best is known."""
    figure = Figure(figsize=(8.4, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _trails(left, placed.sweeps, placed.annealing, None)
    left.set_title("gpt-oss-20b, 8 devices")
    weights, num_devices = instance(RANDOM, SEED), int(RANDOM.split("x")[2])
    best = json.loads(FILE.read_text()).get(f"{RANDOM}/{SEED}", {}).get("share")
    annealing = [annealed(weights, num_devices, seconds, seed) for seed in range(SEEDS)]
    _trails(right, swept(weights, num_devices), annealing, best)
    right.set_title(f"random {RANDOM}, instance {SEED}")
    left.set_ylabel("transitions that stay on their device")
    return figure


def _trails(panel: Any, sweeps: Trail, annealing: list[Trail], best: float | None) -> None:
    """Draw one panel of searches as steps and the best known; the bound, far above, in words."""
    end = max(trail.seconds for trail in annealing)
    if best is not None:
        panel.axhline(best, color=GREEN, linestyle="-.", linewidth=1.2, label=f"best known: {percent(best, 2)}")
    kept_least, kept_most = (percent(pick(trail.kept for trail in annealing), 2) for pick in (min, max))
    labels = [
        f"annealing, {len(annealing)} seeds: {kept_least} to {kept_most}",
        *[None] * (len(annealing) - 1),
        f"sweeps: {percent(sweeps.kept, 2)}",
    ]
    for trail, label in zip([*annealing, sweeps], labels, strict=True):
        times, kept = zip(*trail.steps, strict=True)
        color = RED if trail is sweeps else BLUE
        panel.step([*times, end], [*kept, kept[-1]], where="post", color=color, linewidth=1.2, label=label)
    panel.plot([], [], " ", label=f"simple bound, above: {percent(sweeps.bound, 2)}")
    panel.set(xscale="log", xlabel="CPU seconds of all threads")
    panel.xaxis.set_major_formatter("{x:g}")
    panel.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.17))
    _dress(panel)
    panel.yaxis.set_major_formatter(PercentFormatter(1, 1, " %"))


def _dress(panel: Any) -> None:
    panel.grid(color="0.9")
    panel.spines[["top", "right"]].set_visible(False)
    panel.yaxis.set_major_formatter(PercentFormatter(1, 0, " %"))


def _shares(weights: Array, placement: Placement) -> Array:
    """What stays on its device of each layer pair, `[L-1]`."""
    return np.asarray(hops_kept(weights, placement, DEVICES).device / weights.sum(axis=(1, 2)))


def _kept(weights: Array, placement: Placement) -> float:
    return float(hops_kept(weights, placement, DEVICES).device.sum() / weights.sum())


def _save(figure: Figure, name: str) -> None:
    figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())
