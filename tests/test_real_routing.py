"""ExFlow on the real routing of gpt-oss-20b, from the file to a certified plan, against a recount from the file."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moeplan.planner.certify import certify
from moeplan.planner.request import Request
from moeplan.planner.solve import solve
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.plan import Plan
from moeplan.traces.importers import import_trace

NUM_DEVICES = 8


@pytest.fixture(scope="module")
def trace(gpt_oss: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt-oss") / "trace"
    import_trace(gpt_oss, folder)
    return folder


@pytest.fixture(scope="module")
def plan(trace: Path) -> Plan:
    return solve(
        Request.of(strategy="exflow", trace=str(trace), cluster=Cluster(1, NUM_DEVICES), seed=0, time_limit_s=5.0)
    )


def held_out_of(plan: Plan) -> Any:
    """The evaluation on unseen samples."""
    assert plan.evaluation is not None
    return plan.evaluation.held_out


def held_out_metrics(plan: Plan, name: str) -> dict[str, float]:
    (metrics,) = (
        contender.metrics
        for contender in held_out_of(plan).contenders
        if (contender.name, contender.dispatch_model) == (name, "coherent")
    )
    return {metric: measured.value for metric, measured in metrics.items()}


def unseen_tokens(sample_T: NDArray[Any], seed: int) -> NDArray[np.bool_]:
    """Tokens of samples whose hash lies in the upper half."""
    digests = {sample: hashlib.sha256(f"{seed}:{sample}".encode()).hexdigest() for sample in set(sample_T.tolist())}
    return np.array([int(digests[sample][:16], 16) >= 2**63 for sample in sample_T.tolist()])


def device_table(plan: Plan) -> NDArray[np.int64]:
    """The device of each expert, `[L, E]`, read off the plan's lists."""
    decision = plan.decisions.placement
    assert decision is not None
    assert isinstance(decision.slots_per_device, int)
    table_LE = np.full((24, 32), -1)
    for layer, row in enumerate(decision.physical_to_logical):
        for slot, expert in enumerate(row):
            table_LE[layer, expert] = slot // decision.slots_per_device
    return table_LE


def test_held_out_hops_are_kept_and_balance_stands_beside(plan: Plan) -> None:
    planned, contiguous = held_out_metrics(plan, "plan"), held_out_metrics(plan, "contiguous")
    assert planned["hops_kept"] >= 0.56
    assert contiguous["hops_kept"] < 0.2
    assert 1 < planned["balance"] < 3
    assert plan.verdict is not None
    assert plan.verdict.value == "benefit"


def test_the_certificate_agrees(plan: Plan, trace: Path) -> None:
    assert "trace hash" in certify(plan, trace).checks


def test_a_recount_from_the_file_gives_the_same_share_to_the_last_token(plan: Plan, gpt_oss: Path) -> None:
    with np.load(gpt_oss) as arrays:
        unseen_T = unseen_tokens(arrays["seq_id"], seed=0)
        first_TL = arrays["expert_ids"][unseen_T, :, 0]
    device_TL = device_table(plan)[np.arange(24), first_TL]
    kept = int((device_TL[:, 1:] == device_TL[:, :-1]).sum())
    assert held_out_metrics(plan, "plan")["hops_kept"] == kept / (23 * len(device_TL))
    assert held_out_of(plan).num_tokens == len(device_TL)
