"""The runtime on an emulated cluster: seconds of steps, beside what a profile taken before predicted.

Computation is a calibrated wait, since ranks outnumber cores; the network, its bytes and the runtime are real.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from moeplan.planner.evaluate.metrics import COPIES, EXCHANGE, EXPERTS
from moeplan.planner.evaluate.price import STEP

from ..emulated_cluster.case import Figure
from ..emulated_cluster.network import WIRE
from ..emulated_cluster.replaying import replayed
from ..emulated_cluster.suite import CLUSTERS, MANY_ROUNDS, ROUNDS, found, say
from ..study import Row, Settings, Study

Instance = tuple[str, int]
EMULATED = (
    f"Nodes are network namespaces on links of {WIRE.rate_mbps:g} Mbit/s (tbf, burst {WIRE.burst_bytes // 1024} KiB);"
    " traffic inside a node is not shaped; attention and experts are calibrated waits. Seconds: the slowest rank's,"
    " median of rounds in which the ways run in turn, with its 95 % interval; x base: median of the rounds' ratios."
)


def _instances(settings: Settings) -> list[Instance]:
    clusters = CLUSTERS[:1] if settings.quick else CLUSTERS
    return [(cluster, MANY_ROUNDS if settings.full else ROUNDS) for cluster in clusters]


def _rows(name: str, instance: Instance) -> Iterator[Row]:
    return map(_row, found(*instance).figures[name])


def _row(figure: Figure) -> Row:
    low, high = figure.measured.interval
    more = {"from, s": low, "to, s": high}
    if figure.ratio is not None:
        more |= {"x from": figure.ratio[1], "x to": figure.ratio[2]}
    if figure.predicted_s is not None:
        more["prediction over measured, %"] = figure.predicted_s / figure.measured.median - 1
    return Row(
        figure.instance,
        figure.method,
        quality=figure.predicted_s,
        seconds=figure.measured.median,
        ratio=None if figure.ratio is None else figure.ratio[0],
        more=more | figure.told,
    )


def _profile(instance: Instance) -> Iterator[Row]:
    profile = found(*instance).profile
    for name, fit in (
        ("exchange between nodes", profile.inter),
        ("exchange in a node", profile.intra),
        ("chunk", profile.chunk),
        ("gather", profile.gather),
    ):
        line, held = fit.alpha_beta, fit.held_out.get(fit.model.kind)
        more = {"start, s": line.a_s, "Mbit/s": 8e-6 / line.b_s}
        yield Row(instance[0], name, quality=held.median_error if held else None, more=more)


def _points(instance: Instance) -> Iterator[Row]:
    for figure in (figure for case in found(*instance).figures.values() for figure in case):
        if figure.size is not None and figure.predicted_s is not None:
            name, curve = figure.instance, figure.method
            if figure.curve:
                name, curve = f"{name}, {figure.method}", figure.curve
            for what, value in (("measured", figure.measured.median), ("predicted", figure.predicted_s)):
                yield Row(name, f"{curve}: {what}", quality=value, axis=figure.axis, size=figure.size)


def _replays(instance: Instance) -> Iterator[Row]:
    chain = replayed(*instance, say)
    for what, done in chain.replays.items():
        for way in done.ways:
            predicted = {metric: span.value for metric, span in way.predicted.items()}
            more = {
                "from, s": way.step.low,
                "to, s": way.step.high,
                "prediction over measured, %": predicted[STEP] / way.step.value - 1,
                "exchange, s": way.exchange_s,
                "exchange predicted, s": predicted[EXCHANGE],
                "experts, s": way.experts_s,
                "experts predicted, s": predicted[EXPERTS],
                "copies": way.copies,
                "copies predicted": predicted[COPIES],
            }
            yield Row(
                f"{chain.cluster} {what}",
                Path(way.name).stem,
                quality=predicted[STEP],
                seconds=way.step.value,
                ratio=1 / (1 - way.gain.value),
                more=more,
            )


def _study(name: str, title: str, baseline: str, note: str) -> Study[Instance]:
    return Study(
        title=title,
        quality="predicted, s",
        baseline=baseline,
        note=f"{note} {EMULATED}",
        instances=_instances,
        rows=partial(_rows, name),
    )


STUDIES = (
    Study(
        title="Profile, taken first",
        quality="median error on sizes held out, %",
        note="How well the fitted curves predict exchanges of other sizes. "
        "By bytes through the busiest node, or from a rank to its own node. Start and rate are those of the best"
        " line; the fits that predict are monotone curves. A chunk is one of a layer's, whose experts take no time.",
        instances=_instances,
        rows=_profile,
    ),
    _study(
        "inference",
        "ExFlow: whole sequences, tokens that stay or return",
        "contiguous, standard",
        "Seconds of a forward pass, or of a few new tokens, under each plan. "
        "K experts per token; tokens of kinds that the placement was not fitted to. With K = 2 it is fitted to the"
        " first choices, and the second ones go their own ways.",
    ),
    _study(
        "rehoming",
        "NetMoE: a training step, samples that stay or move",
        "samples stay",
        "Seconds of a training step with samples that stay or move. "
        "Forward and backward of 6 layers, another batch each round. A node has the paper's 16 experts and 32 samples."
        " Samples prefer experts, Dirichlet(2.5 / E), K = 2 distinct ones a token: the same in all layers (persistent),"
        " or others in each (independent). 2.5 is chosen so that as many pairs are left between nodes as on average in"
        " the paper's Table 5: 61 % on two nodes, 63 % on four.",
    ),
    _study(
        "condensing",
        "LUFFY: a training step, rows that stand for others, in fp8, and samples that move",
        "every row",
        "Seconds of a training step, forward and backward of 3 layers, another batch each round, of four. Rows are"
        " those of the embedded model's layers 0, 2 and 4 on text that it never saw, repeated to 1,040 bfloat16"
        " elements, with their experts and gates, 8 samples of 128 a rank. They are compared, folded and encoded for"
        " real; what that costs is measured before, on the first step's rows, none of which is sent. Bits: above every"
        " row, on the same text, all six layers of the model going that way, with the 95 % interval over samples. Homes"
        " and condensed rows do not go together (docs/luffy.md).",
    ),
    _study(
        "pipelining",
        "PipeMoE: degrees of one layer",
        "degree 1",
        "Seconds of one layer at several degrees, the planned one among them. "
        "Forward; or forward and backward, planned with a degree each or one for both (solve --joint). t_e and t_d: the"
        " experts' and the dispatch's seconds forward at degree 1. The model's limit is t(1) / t(planned).",
    ),
    _study(
        "overhead",
        "Overhead: one layer in one chunk, forward",
        "two all-to-alls by hand",
        "Seconds of one layer by moeplan, beside one written by hand. "
        "Experts take no time. By hand every token-expert pair travels, moeplan sends a token once a device.",
    ),
    Study(
        title="moeplan profile, solve and replay",
        quality="predicted, s",
        baseline="today",
        note="Seconds of the MoE layers of the embedded model as moeplan replay measures them, beside those that a"
        " profile of this cluster predicts, of exchanges up to 1 MB a rank. 256 tokens a rank of text that the"
        " model never saw; exchange and experts: of the forward pass, each after a barrier, experts on shared cores."
        " Copies: hidden vectors sent in a step; rows that stand for others are not sent. Nodes are network"
        f" namespaces on links of {WIRE.rate_mbps:g} Mbit/s.",
        instances=_instances,
        rows=_replays,
    ),
    Study(
        title="Measured beside predicted",
        quality="seconds of a step, s",
        note="Seconds measured beside seconds predicted, step by step. The points of the picture.",
        instances=_instances,
        rows=_points,
    ),
)
