"""Published figures: their sources and assumptions, the predictors recomputed plainly, and the page's counts."""

import re
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from benchmarks.cases.truth import predictors
from benchmarks.cases.truth.page import lines, page
from benchmarks.cases.truth.published import PATH, Published, published
from benchmarks.pipemoe_presets import PRESETS, table_iv
from benchmarks.result import load
from moeplan.errors import InputError
from moeplan.files import read_yaml
from tests.builders import known

DOCS = Path(__file__).parents[2] / "docs"
SAVED = DOCS / "benchmarks" / "truth.json"
ASKED = (
    *("vllm#41141", "vllm#28449", "ATOM#1210", "sglang#19772", "sglang#24515", "DeepEP#343", "DeepSpeed#8213"),
    *("tt-metal#56304", "ExFlow", "PipeMoE", "NetMoE", "FlexMoE", "LUFFY"),
)


def test_every_figure_has_a_source_and_assumptions_and_every_source_asked_for_is_there() -> None:
    file = published()
    assert sum(len(source.figures) for source in file.sources) >= 30
    assert all(source.url.startswith("https://") and source.where and source.date for source in file.sources)
    assert all(len(source.assumes) > 10 and len(source.setup) > 10 for source in file.sources)
    names = [source.name for source in file.sources] + [left.what for left in file.not_predicted]
    assert all(any(name.startswith(asked) for name in names) for asked in ASKED)
    assert len({(source.name, figure.what) for source in file.sources for figure in source.figures}) == sum(
        len(source.figures) for source in file.sources
    )


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("by: chunks", "by: guess", r"PipeMoE, 16 GPUs, degree 1: by guess; expected one of chunks"),
        ("given: {degree: 2}", "given: {degrees: 2}", r"PipeMoE, 16 GPUs, degree 2: chunks got an unexpected"),
        ("measured: 1.168", "measured: 0.0", "PipeMoE, 16 GPUs, degree 1: measured 0"),
        ("model: qwen3_5_397b", "model: qwen", "vllm#41141, ChemData: a model that is not one of models"),
        ('neutral: "EPLB"', 'neutral: "none"', "the better algorithm: neutral 'none'; expected a figure of its source"),
        ("neutral: 1, forced: true", "forced: true", "PipeMoE, 16 GPUs, degree 1: forced, and no change"),
    ],
    ids=str,
)
def test_a_bad_field_is_refused_in_one_clear_line(tmp_path: Path, old: str, new: str, told: str) -> None:
    text = PATH.read_text()
    assert old in text
    (tmp_path / "truth.yaml").write_text(text.replace(old, new, 1))
    with pytest.raises(InputError, match=told) as caught:
        published(tmp_path / "truth.yaml")
    assert "\n" not in str(caught.value)


def test_the_file_holds_no_prediction() -> None:
    assert set(Published.model_fields) == {"exceptions", "models", "sources", "not_predicted"}
    keys = {key for source in read_yaml(PATH, what="it", max_bytes=2**20)["sources"] for key in source}
    assert keys <= {"name", "url", "where", "date", "read", "setup", "assumes", "by", "given", "figures"}


@pytest.mark.parametrize(("gpus", "degree"), [(16, 4), (64, 1)])
def test_degrees_gain_what_every_degree_tried_on_every_layer_gives(gpus: int, degree: int) -> None:
    known, gains = PRESETS[f"rtx2080ti-{gpus}"], []

    def step_s(bytes_: float, macs: float, r: int) -> float:
        dispatch = known.a_a + known.b_a * bytes_ / r
        computed = [factor * (known.a_e + known.b_e * macs / r) for factor in (1, 2)]
        return sum(max(2 * r * dispatch, 2 * dispatch + e + (r - 1) * max(e, dispatch)) for e in computed)

    for layer in table_iv():
        work = layer.dispatched_bytes(), layer.multiply_adds()
        gains.append(step_s(*work, degree) / min(step_s(*work, r) for r in range(1, 60)))
    assert predictors.chunks(gpus=gpus, degree=degree) == pytest.approx(np.mean(gains), rel=1e-9)


def test_an_exchange_takes_its_busiest_port_s_rows() -> None:
    given: dict[str, Any] = {
        "cluster": "2x2",
        "links": ["intra=100:2", "inter=10:5"],
        "tokens": 50,
        "top_k": 2,
        "experts": 8,
    }
    rng, sent = np.random.default_rng(0), np.zeros((4, 4))
    score = -np.log(1e-30 + rng.standard_exponential((200, 8), np.float32))
    for token, row in enumerate(score):
        for expert in np.argsort(-row)[:2]:
            sent[token // 50, expert // 2] += 1
    np.fill_diagonal(sent, 0)
    near = np.kron(np.eye(2), np.ones((2, 2))).astype(bool)
    worst = [max((sent * mask).sum(axis=0).max(), (sent * mask).sum(axis=1).max()) for mask in (near, ~near)]
    expected = max(2e-6 + 1000 * worst[0] / 100e9, 5e-6 + 1000 * worst[1] / 10e9)
    assert predictors.exchange(**given, row_bytes=1000) == pytest.approx(expected, rel=1e-9)


def test_eplb_s_busiest_device_is_the_published_one() -> None:
    loads = [600, 560, 120, 120, 20, 10, 10, 10]
    count = [1] * 8  # replicas go one by one to the largest load a replica; then heaviest first, to the emptiest device
    while sum(count) < 16:
        count[max(range(8), key=lambda e: loads[e] / count[e])] += 1
    weight, room = [0.0] * 8, [2] * 8
    for share in sorted((loads[e] / n for e, n in enumerate(count) for _ in range(n)), reverse=True):
        device = min((d for d in range(8) if room[d]), key=lambda d: weight[d])
        weight[device] += share
        room[device] -= 1
    assert predictors.hottest(loads=loads, devices=8, slots=2, method="published") == pytest.approx(max(weight))


def test_volumes_without_moved_samples_are_those_of_even_routing() -> None:
    given: dict[str, Any] = {"nodes": 4, "hidden": 768, "links": ["intra=400:2", "inter=12.5:5"]}
    rows_mib = 32 * 4 * 1024 * 2 * 768 * 4 / 2**20
    assert predictors.homes(**given, figure="inter") == pytest.approx(rows_mib * (1 - 1 / 4), rel=0.02)
    assert predictors.homes(**given, figure="intra") == pytest.approx(rows_mib * (1 / 4 - 1 / 32), rel=0.1)


CHEAP = (
    ("PipeMoE", "16 GPUs, degree 1"),
    ("NetMoE, volumes", "2 nodes: samples moved"),
    ("ExFlow, affinity", "4 GPUs: crossing saved"),
    ("ExFlow, throughput", "MoE-8 on 8 GPUs"),
    ("LUFFY", "GPT2: 16 GPUs over 2"),
    ("DeepGEMM", "1 expert of 1,024 rows"),
    ("vllm#28449", "in turn over in order"),
    ("sglang#19772", "hierarchical EPLB"),
    ("DeepSpeed#8213", "rows saved by one copy for each rank"),
    ("tt-metal#56304", "combine of layer 18 over layer 23"),
    ("vllm-ascend#3042", "EPLB"),
)
DEAR = {"stays_on_node"}  # a minute; what it divides is what `stays` gives


def test_the_saved_prediction_of_every_predictor_is_the_one_that_comes_out_now() -> None:
    saved = {(row.instance, row.method): row.quality for row in load(SAVED).sections[0].rows}
    file, used = published(), set()
    every = {(source.name, figure.what): (source, figure) for source in file.sources for figure in source.figures}
    for name in CHEAP:
        source, figure = every[name]
        used.add(figure.by or source.by)
        assert saved[name] == pytest.approx(file.predicted(source, figure), rel=1e-6), name
    assert used == predictors.PREDICTORS.keys() - DEAR


def test_a_figure_without_its_prediction_is_refused() -> None:
    rows = load(SAVED).sections[0].rows
    with pytest.raises(InputError, match="PipeMoE, 16 GPUs, degree 1: no prediction is saved"):
        lines(rows[1:])


def test_latent_attention_of_the_models_has_the_weights_of_the_real_one() -> None:
    spec = predictors._spec(**published().models["deepseek"])
    latent = known(spec.attention.latent)
    assert latent.weights(128, 7168) == 7168 * (1536 + 576 + 16384) + 1536 * 24576 + 512 * 32768  # 0.19e9


def test_the_counts_on_the_page_follow_from_its_rows() -> None:
    text = (DOCS / "truth.md").read_text()
    found = lines(load(SAVED).sections[0].rows)
    assert text == page(load(SAVED))
    rows = re.findall(r"\| ([+-][\d.]+) % \|\n", text.partition("## PipeMoE")[2])
    assert len(rows) == len(found)
    errors = [abs(float(row)) for row in rows]
    assert f"the median error is {median(errors):.1f} %" in text
    assert f"{100 * np.mean(np.array(errors) <= 20):.1f} % within 20 %" in text
    by_name = {(line.source.name, line.figure.what): line for line in found}
    signs = list[tuple[bool, bool]]()
    for line in found:
        if (none := line.figure.neutral) is None:
            continue
        base = by_name[line.source.name, none] if isinstance(none, str) else None
        measured, predicted = (none, none) if base is None else (base.figure.measured, base.predicted)
        told = (line.predicted > predicted) == (line.figure.measured > measured)  # type: ignore[operator]
        signs.append((told, line.figure.forced))
    right, free = [told for told, _ in signs], [told for told, forced in signs if not forced]
    assert (
        f"Of {len(signs)} that state a change, better or worse is told right for {100 * np.mean(right):.1f} %" in text
    )
    assert f"of the {len(free)} that could have been told wrong, for {100 * np.mean(free):.1f} %" in text
    assert np.mean(right) >= 0.9
    evidence = [error for error, line in zip(errors, found, strict=True) if not line.figure.arithmetic]
    assert f"Without them the median error is {median(evidence):.1f} %" in text
    misses = text.partition("## Misses")[2].partition("## PipeMoE")[0]
    assert len(re.findall(r"^\| .*: .* % \|", misses, re.MULTILINE)) == sum(error > 20 for error in errors)
    assert "as above" not in misses
