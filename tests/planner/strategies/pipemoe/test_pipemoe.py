"""PipeMoE as a strategy: what it decides, and on what."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeplan.runtime.plan import save
from tests.planner.makers import edited, judged, make_plan, options, placed, stored_tokens


def test_the_decisions_of_the_base_are_kept_and_bound_by_its_hash(
    make_trace: Any, make_profile: Any, tmp_path: Path
) -> None:
    trace, profile = make_trace(samples=40), make_profile()
    on = placed(trace, profile, tmp_path / "base.json")
    base = make_plan(trace, profile, strategy="eplb")
    plan, other = make_plan(trace, profile, on=on), make_plan(trace, profile, on=on, seed=1)
    assert plan.strategies == ("eplb", "pipemoe")
    assert plan.decisions.placement == base.decisions.placement
    assert plan.plan_sha256 != base.plan_sha256
    assert plan.inputs.base is not None
    assert plan.options["placement"] == base.options["placement"]
    assert (set(plan.outcome), set(other.outcome)) == ({"placement", "pipeline"}, {"pipeline"})
    assert options(make_plan(trace, profile)).placement == "contiguous"


def test_on_a_balanced_placement_fewer_seconds_are_left_than_on_contiguous(
    make_trace: Any, make_profile: Any, tmp_path: Path
) -> None:
    """The busiest device's tokens decide, not the uniform count."""
    trace, profile = skewed(make_trace(samples=40, tokens=100), tmp_path / "skewed"), make_profile(noise=0.0)
    on = placed(trace, profile, tmp_path / "base.json", redundant=4)
    balanced, plain = make_plan(trace, profile, on=on), make_plan(trace, profile)
    assert balanced.outcome["pipeline"].objective.value < 0.9 * plain.outcome["pipeline"].objective.value


def test_a_fixed_capacity_and_shares_are_decisions_that_the_hash_covers(make_trace: Any, make_profile: Any) -> None:
    trace, profile = make_trace(samples=32, tokens=400), make_profile("1x2", noise=0.0)
    choices: list[dict[str, Any]] = [{}, {"method": "unequal"}, {"capacity_factor": 1.25}, {"capacity_factor": 1.26}]
    hashes, decided = set(), []
    for choice in choices:
        plan = make_plan(trace, profile, fit_fraction=1.0, max_degree=4, **choice)
        decision = plan.decisions.pipeline
        assert decision is not None
        assert {one.capacity_factor for one in options(plan).baselines.values()} == {decision.capacity_factor}
        decided.append((decision.shares is not None, decision.capacity_factor))
        hashes.add(plan.plan_sha256)
    assert decided == [(False, None), (True, None), (False, 1.25), (False, 1.26)]
    assert len(hashes) == 4


def skewed(trace: Any, folder: Path) -> Any:
    """Most first choices fall on experts 0 and 1."""
    batches = list(trace.batches())
    for batch in batches:
        batch.ids[: len(batch) * 2 // 3] = [0, 1]
    return stored_tokens(folder, trace.model, *batches)


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=False), st.sampled_from(["exact", "robust", "unequal"]))
def test_other_names_for_experts_or_for_devices_change_no_degree_and_no_figure(
    make_trace: Any, make_profile: Any, tmp_path_factory: Any, random: Any, method: str
) -> None:
    """Devices move with their node; the base's slots, the homes of samples and the experts follow."""
    folder = tmp_path_factory.mktemp("relabelled")
    profile, plain = make_profile("2x2"), make_trace(samples=16, tokens=40)
    nodes = random.sample([[0, 1], [2, 3]], 2)
    device = np.array([one for node in nodes for one in random.sample(node, 2)])  # the new one of each old
    expert = np.array(random.sample(range(8), 8))
    here = np.array([int(sample) % 4 for batch in plain.batches() for sample in batch.sample])
    plans = []
    for name, to_expert, to_device in (("old", np.arange(8), np.arange(4)), ("new", expert, device)):
        batches, start = [], 0
        for batch in plain.batches():
            home = to_device[here[start : start + len(batch)]].astype(np.int32)
            start += len(batch)
            batches.append(replace(batch, ids=to_expert[batch.ids].astype(batch.ids.dtype), source_rank=home))
        trace = stored_tokens(folder / name, plain.model, *batches)
        base = make_plan(trace, profile, strategy="contiguous", dispatch_model="standard")
        slots = np.empty((plain.model.num_layers, 4, 2), np.int64)
        for number in range(8):
            slots[:, to_device[number // 2], number % 2] = to_expert[number]
        rows = np.sort(slots, axis=2).reshape(len(slots), 8).tolist()
        on = folder / f"{name}.json"
        save(edited(base, "decisions/placement/physical_to_logical", rows), on)
        plans.append(make_plan(trace, profile, on=on, method=method, max_degree=8))
    old, new = plans
    assert old.decisions.pipeline == new.decisions.pipeline
    assert options(old) == options(new)
    for ours, theirs in zip(*(judged(plan).items() for plan in plans), strict=True):
        assert ours == theirs or ours[0] == "contiguous/standard"  # in the order of names
