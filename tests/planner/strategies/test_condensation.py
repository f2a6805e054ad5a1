"""Plans that condense rows: figures recounted token by token by an emulation that shares no code, and refusals.

Legend: T tokens; K experts per token; E experts; D devices.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch.nn import functional

from moeplan.errors import CertificationError, InputError, MismatchError, UsageError
from moeplan.planner.certify import certify
from moeplan.planner.demo.model import MoEBlock, load_embedded
from moeplan.planner.demo.text import other_text, record_embedded, samples
from moeplan.planner.evaluate.journey import today
from moeplan.planner.params import Params, flags_of
from moeplan.planner.strategies.luffy import LuffyParams
from moeplan.planner.strategies.luffy.folding import Counted, Gate, History, Rows, Seats, Star, Way
from moeplan.planner.strategies.luffy.measured import Judged
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.engine.condenser import standing
from moeplan.runtime.engine.copies import select
from moeplan.traces.reader import Trace
from tests.planner.makers import edited, planned, said
from tests.runtime.condensation_reference import CondensedExperts
from tests.runtime.wire_reference import by_hand

LENGTH, SAMPLES, DEVICES = 24, 16, 4
PARSE: dict[str, Any] = {name: one.parse for name, one in flags_of(LuffyParams)}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(other_text()[: LENGTH * SAMPLES], encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def trace(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """The embedded model on it, with hidden states and gate weights."""
    folder = tmp_path_factory.mktemp("trace") / "trace"
    return record_embedded(text.read_text(), folder, sample_tokens=LENGTH, weights=True, embeddings="all")


def emulated(layer: int, reach: float, *, gains: Any = None, **rule: Any) -> CondensedExperts:
    """The experts of a layer on 2x2 devices, samples dealt in turn, row by row."""
    block = load_embedded().layers[layer].moe
    assert isinstance(block, MoEBlock)
    placement = today(load_embedded().config.spec(), Cluster.parse("2x2")).journey.placement
    home_T = np.arange(SAMPLES).repeat(LENGTH) % DEVICES
    ranks = cast(Sequence[range], [np.flatnonzero(home_T == rank).tolist() for rank in range(DEVICES)])
    turn_T = np.zeros(len(home_T), np.int64)
    gain_E = None if gains is None else gains[layer]
    experts = CondensedExperts(block.experts, placement.holds(layer), ranks, turn_T, gain_E=gain_E, **rule)
    experts.reach = reach
    return experts


@pytest.mark.parametrize("method", ["joint", "paper"])
def test_rows_saved_are_those_of_a_recount_from_the_hidden_states(trace: Trace, method: str) -> None:
    how = 0.3037 if method == "joint" else 0.8513
    plan = planned(trace, "luffy", fit_fraction=1.0, condense=how, method=method)
    (batch,) = trace.batches(weights=True)
    (path,) = Path(trace.path).glob("embeddings-*")
    hidden, rows, sent = load_file(path), [], []
    assert batch.weights is not None
    for layer in range(6):
        experts = emulated(layer, how if method == "joint" else float(np.sqrt(2 - 2 * how)), cosine=method == "paper")
        x, ids = torch.from_numpy(hidden[f"layer_{layer}"]).float(), torch.from_numpy(batch.ids[:, layer].astype(int))
        experts(x, ids, torch.from_numpy(batch.weights[:, layer]).float())
        rows.append(sum(experts.seen.rows))
        sent.append(sum(experts.seen.sent))
    found = plan.options["condensation"]["fit"]
    assert found["rows_per_step"] == sum(rows)
    assert found["ways"][0]["rows_saved"] == pytest.approx(1 - sum(sent) / sum(rows), abs=1e-12)
    assert found["ways"][0]["layers_saved"] == pytest.approx([1 - b / a for a, b in zip(rows, sent, strict=True)])
    assert 0.1 < found["ways"][0]["rows_saved"] < 0.9
    assert plan.verdict is None
    assert "error not known" in said(plan)
    assert "benefit" not in said(plan)


def travelled(row: torch.Tensor) -> torch.Tensor:
    """A row after its way to another device in fp8, by hand."""
    return torch.from_numpy(by_hand(row.double().numpy())).to(row.dtype)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("plan", {"condense": 0.0523}),
        ("plan", {"condense": 0.0523, "medoid": True}),
        ("plan + fp8", {"condense": 0.0523}),
    ],
)
def test_loss_error_and_rows_are_those_of_an_emulation(
    trace: Trace, text: Path, name: str, settings: dict[str, Any]
) -> None:
    plan = planned(trace, "luffy", fit_fraction=1.0, model="embedded", text=text, **settings)
    decision, part = plan.decisions.condensation, plan.options["condensation"]["fit"]
    model, exact, errors = load_embedded(), load_embedded(), []
    rule = {"gains": decision.gains, "medoid": decision.medoid, "travelled": travelled if "fp8" in name else None}
    layers = [emulated(layer, decision.tau, **rule) for layer in range(6)]
    for layer, experts in enumerate(layers):
        block = model.layers[layer].moe
        assert isinstance(block, MoEBlock)
        block.experts = experts  # type: ignore[assignment]
        twin = exact.layers[layer].moe.experts  # type: ignore[union-attr]

        def seen(_module: Any, called: Any, y: Any, twin: Any = twin) -> None:
            true = twin(*called)
            errors.append(float((true - y).norm() / true.norm()))

        experts.register_forward_hook(seen)
    tokens = torch.from_numpy(samples(text.read_text(), LENGTH))
    with torch.no_grad():
        bits = [
            functional.cross_entropy(of(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item() / np.log(2)
            for of in (load_embedded(), model)
        ]
    (ours,) = (one for one in part["ways"] if one["name"] == name)
    assert part["loss_bits"] == pytest.approx(bits[0], abs=1e-5)
    apart = 1e-3 if "fp8" in name else 2e-4  # where sums in another order round the other way
    assert ours["bits"]["value"] == pytest.approx(bits[1] - bits[0], abs=apart)
    assert ours["error"]["value"] == pytest.approx(np.mean(errors), rel=1e-3)
    rows, sent = (sum(sum(getattr(one.seen, name)) for one in layers) for name in ("rows", "sent"))
    assert ours["rows_saved"] == pytest.approx(1 - sent / rows, abs=2 / rows)
    assert "RESULTS CHANGE" in said(plan)


def test_a_record_that_contradicts_itself_is_refused(trace: Trace) -> None:
    plan = planned(trace, "luffy", condense=0.05)
    assert "record of condensation" in certify(plan).checks
    for path, change in (
        ("options.condensation.held_out.ways.1.rows_saved", 1.0),
        ("options.condensation.fit.ways.0.rows_saved", lambda saved: saved + 1e-4),
        ("outcome.condensation.objective.value", 0.5),
    ):
        with pytest.raises(CertificationError):
            certify(edited(plan, path, change))


def test_fp8_rows_of_the_plan_are_judged_so(trace: Trace) -> None:
    plan = planned(trace, "luffy", condense=0.05, wire="fp8")
    ours, *others = plan.options["condensation"]["fit"]["ways"]
    plain, *_ = planned(trace, "luffy", condense=0.05).options["condensation"]["fit"]["ways"]
    assert plan.decisions.wire == "fp8"
    assert ours["rows_saved"] == plain["rows_saved"]
    assert 1 - ours["bytes_saved"] == pytest.approx((1 - plain["bytes_saved"]) * (128 + 4) / (128 * 4))
    assert all(one["name"] != "plan + fp8" for one in others)


def test_the_threshold_keeps_its_budget_and_rivals_stand_beside(trace: Trace, text: Path) -> None:
    plan = planned(trace, "luffy", model="embedded", text=text, condense_loss=0.05)
    options = plan.options["condensation"]
    ways = {one["name"]: one for one in options["fit"]["ways"]}
    assert ways["plan"]["rows_saved"] == 1 - plan.outcome["condensation"].objective.value
    assert 0.04 < ways["plan"]["bits"]["value"] <= 0.05
    assert ways["fp8 rows alone"]["rows_saved"] == 0
    assert ways["fp8 rows alone"]["bytes_saved"] == pytest.approx(1 - (128 + 4) / (128 * 4))
    assert ways["plan + fp8"]["bytes_saved"] > max(ways[one]["bytes_saved"] for one in ("plan", "fp8 rows alone"))
    assert sum(name.startswith(("paper", "Eq. 2")) for name in ways) == 5
    literal = 1 / (1 + np.exp(1 - options["fit"]["loss_bits"] / 8))  # of a loss that began at 8 bits per byte
    assert {f"Eq. 2 literal, cosine {literal:.2f}", f"Eq. 2 corrected, cosine {2 * literal:.2f}"} < ways.keys()
    assert options["held_out"]["num_samples"] + options["fit"]["num_samples"] <= SAMPLES
    again = planned(trace, "luffy", model="embedded", text=text, condense_error=0.1)
    errors = [again.options["condensation"][part]["ways"][0]["error"]["value"] for part in ("fit", "held_out")]
    assert 0.097 < errors[0] <= 0.1 < errors[1]  # the threshold is chosen on the fitted samples, and used up there


def test_rows_stand_for_others_as_the_runtime_has_it() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=generator)
    weight, ids = torch.rand(40, 8, generator=generator).topk(2, dim=1)
    device, home = ids % 4, torch.ones(40, dtype=torch.int64)
    rows = Rows.of(ids, device, home, torch.zeros_like(home), (4, 2))
    gains = (tuple(0.5 + 0.1 * expert for expert in range(8)),)
    for rule, cosine, reach, gain in ((Gate(0.6, gains), False, 0.6, gains[0]), (Star(0.5), True, 1.0, None)):
        copies, gain_E = select(ids, device, None, (1, 4)), None if gain is None else torch.tensor(gain)
        theirs = standing(copies, x, weight, copies.place != 1, reach, cosine=cosine, gain_E=gain_E)
        assert (theirs != torch.arange(len(theirs))).any()
        assert torch.equal(rule(0, rows, x, weight), theirs)


def test_counts_tell_rows_by_device_and_node_and_experts_asked_before_and_after() -> None:
    ids, home = torch.tensor([[2, 3], [2, 3], [4, 0], [4, 6]]), torch.zeros(4, dtype=torch.int64)
    weight = torch.tensor([[0.6, 0.4], [0.6, 0.4], [0.5, 0.5], [0.8, 0.2]])
    seats = Seats(home, home, (4, 2), lambda _, ids: ids // 2)  # device 1 is near, 2 and 3 are on another node
    rows, _ = Way("as they are").rows(0, ids, weight, seats)
    at = zip(rows.copies.row.tolist(), (rows.copies.place % 4).tolist(), strict=True)
    row, stands = {pair: one for one, pair in enumerate(at)}, torch.arange(6)
    stands[row[1, 1]], stands[row[3, 2]] = row[0, 1], row[2, 2]
    assert rows.counted(stands) == {"rows": 5, "sent": 3, "far_rows": 3, "far_sent": 2, "pairs": 8, "computed": 5}
    fewer, left = Way("second experts dropped", drop=0.3).rows(0, ids, weight, seats)
    counts = fewer.counted(torch.arange(5))
    assert counts == {"rows": 5, "sent": 4, "far_rows": 3, "far_sent": 2, "pairs": 8, "computed": 7}
    assert torch.equal(left, weight * (weight != 0.2))


def test_history_takes_sure_pairs_from_the_layer_before_and_computes_the_rest() -> None:
    here, weight = torch.zeros(4, dtype=torch.int64), torch.ones(4, 1)
    rule = History(0.8, 0.9, 0.3)
    before, now = (
        Rows.of(ids, ids, here, here, (4, 2)) for ids in (torch.tensor([[1], [1], [2], [1]]), here[:, None] + 1)
    )
    rule(0, before, torch.tensor([[1.0, 0], [1, 0.1], [1, 0], [1, 1]]), weight)
    # Cosines: 0 and 1 were above s1; 2 shared no expert; 3 was between s1 and s2 of both, and is now equal to 0.
    stands = rule(1, now, torch.tensor([[1.0, 0], [0, 1], [1, 0], [1, 0]]), weight)
    assert stands.tolist() == [0, 0, 2, 0]
    assert rule.computed == [2, 6]


def test_a_rise_is_per_token_with_the_interval_of_resampled_samples() -> None:
    bits, exact, predicted = np.random.default_rng(0).normal(3, 10, 400), np.zeros(400), np.full(400, 10.0)
    ours, theirs = (Judged(Counted(), of, predicted, bits[:, None], bits[:, None], 2) for of in (bits, exact))
    value, low, high = ours.rise(theirs, 0)
    half = 1.96 * bits.std() / 20 / 10
    assert value == pytest.approx(bits.mean() / 10)
    assert [value - low, high - value] == pytest.approx([half, half], rel=0.15)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"condense": -0.1}, "--condense -0.1 by --method joint; expected an error of at least 0"),
        ({"condense": 1.5, "method": "paper"}, "expected a cosine from -1 to 1"),
        ({"condense_error": 1.0}, "--condense-error 1.0; expected a share from 0 to below 1"),
        ({"condense": 0.1, "condense_loss": 0.1}, "--condense and --condense-loss each say how far"),
        ({"condense_loss": 0.1}, "--condense-loss without a model, which tells it"),
        ({"medoid": True}, "--medoid where samples move; give --condense TAU beside it"),
        ({"condense": 0.1, "numbers": "free"}, "--numbers with --condense, which moves no samples"),
        ({"condense": 0.1, "condense_schedule": "paper"}, "expected --method paper and --condense COSINE"),
    ],
)
def test_what_does_not_go_together_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        LuffyParams(**asked).check(Cluster(1, 2))


@pytest.mark.parametrize("text", ["0.3:0.9", "0.3:0.3"])
def test_history_needs_the_first_cosine_above_the_second(text: str) -> None:
    with pytest.raises(UsageError, match="expected cosines with S1 above S2"):
        PARSE["condense_history"](text)


@pytest.mark.parametrize("text", ["1", "-0.1", "nan", "often"])
def test_a_share_is_from_0_to_below_1(text: str) -> None:
    with pytest.raises(UsageError, match="expected a share of the rows from 0 to below 1, or paper"):
        PARSE["condense_schedule"](text)


def test_hidden_states_of_another_model_or_of_other_tokens_are_refused(trace: Trace, tmp_path: Path) -> None:
    (path,) = Path(trace.path).glob("embeddings-*")
    (part,) = Path(trace.path).glob("part-*")
    hidden = load_file(path)
    (tmp_path / part.name).write_bytes(part.read_bytes())
    copy = cast(Any, SimpleNamespace(path=tmp_path))
    with pytest.raises(UsageError, match="no hidden states beside it"):
        planned(copy, "luffy", condense=0.1)
    for change, message in (
        ({name: of[:, :64].copy() if name.startswith("layer") else of for name, of in hidden.items()}, "another model"),
        (hidden | {"layer_6": hidden["layer_5"]}, "layer_6 of a model of 6 MoE layers"),
        (hidden | {"position": hidden["position"] + 1}, "hidden states of other tokens"),
    ):
        save_file(change, tmp_path / path.name)
        with pytest.raises(MismatchError, match=message):
            planned(copy, "luffy", condense=0.1)
    layer, size = hidden["layer_1"], len(hidden["position"])
    for change, message in (
        ({"layer_1": np.concatenate([layer[:1], layer])}, rf"layer_1 is F16 \[{size + 1}, 128\]; expected numbers"),
        ({"layer_1": layer[:, 0].copy()}, rf"layer_1 is F16 \[{size}\]"),
        ({"layer_1": layer[None]}, rf"layer_1 is F16 \[1, {size}, 128\]"),
        ({"layer_1": layer.astype(np.int64)}, "layer_1 is I64"),
        ({"position": hidden["position"].astype(np.float32)}, rf"position is F32 \[{size}\]; expected whole numbers"),
        ({"sample": hidden["sample"][1:].copy()}, rf"sample is I64 \[{size - 1}\]"),
    ):
        save_file(hidden | change, tmp_path / path.name)
        with pytest.raises(InputError, match=message):
            planned(copy, "luffy", condense=0.1)


def test_another_text_than_the_traces_is_refused(trace: Trace, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(other_text()[1000:3000])
    with pytest.raises(MismatchError, match="choices of experts are the trace's"):
        planned(trace, "luffy", condense=0.1, model="embedded", text=tmp_path / "text.txt")


def test_luffy_still_decides_homes_unless_asked_to_condense() -> None:
    assert LuffyParams().decides == "sample_policy"
    assert LuffyParams(condense=0.0).decides == "condensation"
    assert Params().decides == ""


def test_beside_samples_that_move_it_is_refused_with_the_rows_of_both(trace: Trace, tmp_path: Path) -> None:
    planned(trace, "netmoe", to=tmp_path / "moving.json", samples_per_step=4, method="sum")
    with pytest.raises(UsageError) as refused:
        planned(trace, "luffy", on=tmp_path / "moving.json", condense=0.3, samples_per_step=4)
    words = r"([\d,]+) as they are and ([\d,]+) condensed and ([\d,]+) with samples moving and ([\d,]+) with both"
    found = re.search(words, str(refused.value))
    assert found is not None
    as_is, condensed, moving, both = (int(number.replace(",", "")) for number in found.groups())
    assert condensed < both < as_is
    assert condensed < moving
    with pytest.raises(UsageError, match="--condense beside the sample_policy"):
        planned(trace, "luffy", on=tmp_path / "moving.json", condense_loss=0.1, model="embedded", text=tmp_path / "t")
