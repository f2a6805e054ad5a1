"""A wrapped model of transformers is called as it was: inputs by name go through, and its own output comes back."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from moeplan.errors import UsageError
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.world import World
from moeplan.runtime import parallelize
from moeplan.runtime.dispatch import DISPATCHES
from moeplan.runtime.plan import Plan
from moeplan.solvers.placement import Placement, ReplicaRule
from moeplan.traces.model import ModelSpec
from tests.runtime.models.huggingface_models import make_model
from tests.runtime.plans import made_plan
from tests.runtime.worlds import by_case, close, refusal_of

pytest.importorskip("transformers")

FAMILIES = ("olmoe", "gpt_oss")
SAMPLES = 2  # of each rank


@dataclass
class Answer:
    """What a rank's model returned, and what it refused."""

    kind: str
    keys: list[str]
    loss: float
    logits: np.ndarray
    gradient: np.ndarray
    same_as_tokens: bool
    num_routed: int
    refusals: list[str]


def plan_of(family: str) -> Plan:
    model = ModelSpec(name=family, layer_ids=(0, 1, 2), num_experts=6, top_k=2, hidden_size=32)
    return made_plan(Cluster(1, 2), model, Placement.from_sets([[[0, 2, 5], [1, 3, 4]]] * 3, 6, ReplicaRule.EVEN))


def inputs_of(rank: int) -> dict[str, torch.Tensor]:
    """Two samples of seven tokens, of which the second is shorter; labels leave its padding out."""
    ids = torch.randint(64, (SAMPLES, 7), generator=torch.Generator().manual_seed(rank))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask.bool(), -100)}


def gradient_of(model: Any) -> np.ndarray:
    gradient: np.ndarray = model.get_input_embeddings().weight.grad.numpy()
    return gradient


def answer_of(family: str, rank: int) -> Answer:
    """What this rank gets from a family."""
    spread, inputs = parallelize(make_model(family), plan_of(family), gradients="sum"), inputs_of(rank)
    output = spread(**inputs)
    output.loss.backward()
    by_tokens = spread(inputs["input_ids"], mask=inputs["attention_mask"])
    coherent = parallelize(make_model(family), plan_of(family), dispatch="coherent")
    attempts = (
        lambda: spread(),
        lambda: spread(**inputs, samples=torch.arange(3)),
        lambda: spread(**inputs, mask=inputs["attention_mask"]),
        lambda: coherent(**inputs),
    )
    return Answer(
        type(output).__name__,
        list(output.keys()),
        float(output.loss),
        output.logits.detach().numpy(),
        gradient_of(spread.model),
        torch.equal(by_tokens, output.logits),
        sum(len(routed.ids) for routed in spread.routed),
        [refusal_of(attempt) for attempt in attempts],
    )


def run_families(world: World, families: list[str]) -> list[Answer]:
    return [answer_of(family, world.rank) for family in families]


@pytest.fixture(scope="module")
def answers() -> dict[str, list[Answer]]:
    """By family, then rank."""
    return dict(zip(FAMILIES, by_case(2, run_families, FAMILIES), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_logits_and_gradients_by_name_are_those_of_the_model_alone(
    family: str, answers: dict[str, list[Answer]]
) -> None:
    for rank, answer in enumerate(answers[family]):
        alone: Any = make_model(family)
        expected = alone(**inputs_of(rank))
        expected.loss.backward()
        assert (answer.kind, answer.keys) == (type(expected).__name__, list(expected.keys()))
        assert {"loss", "logits"} <= set(answer.keys)
        assert close(answer.loss, expected.loss.item())
        assert close(answer.logits, expected.logits.detach().numpy())
        assert close(answer.gradient, gradient_of(alone))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_call_by_tokens_gives_the_same_logits_and_both_tell_what_was_routed(
    family: str, answers: dict[str, list[Answer]]
) -> None:
    for answer in answers[family]:
        assert answer.same_as_tokens
        assert answer.num_routed == 3 * SAMPLES * 7


def test_what_cannot_be_called_so_is_refused_by_name(answers: dict[str, list[Answer]]) -> None:
    said = ("no tokens; expected", r"samples of shape [3] for 2 rows", "mask beside", "under coherent dispatch, which")
    for answer in answers["olmoe"]:
        for words, refusal in zip(said, answer.refusals, strict=True):
            assert refusal.startswith("UsageError: ")
            assert words in refusal


@pytest.mark.parametrize("name", ["coherent", "migrating"])
def test_a_dispatch_that_takes_the_model_apart_refuses_its_inputs(name: str) -> None:
    dispatches: Any = DISPATCHES
    refuse = vars(dispatches[name])["call"]
    with pytest.raises(UsageError, match=f"labels, weight under {name} dispatch, .*dispatch='standard'"):
        refuse(None, None, (), {"labels": 1, "weight": 2})
