"""What is known of a model, as files and hashes have it."""

import pytest

from moeplan.errors import InputError
from moeplan.traces.model import ModelSpec
from moeplan.traces.schema import TraceMeta

OLD = (
    '{"schema_version":1,"form":"tokens","model":{"name":"m","layer_ids":[0],"num_experts":8,"top_k":2,'
    '"num_hidden_layers":null,"num_mtp_layers":null,"num_expert_groups":4,"num_shared_experts":null,'
    '"hidden_size":null,"ffn_size":null,"dtype_bytes":null,'
    '"attention":{"kv_size":null,"num_heads":null,"num_kv_heads":null}},'
    '"tokenizer":null,"recorder":"x","step_order":"known"}'
)


def test_a_model_without_a_limit_on_groups_is_written_as_it_was_before_there_were_limits() -> None:
    read = TraceMeta.model_validate_json(OLD)
    assert read.model.top_k_groups is None
    assert read.to_json() == OLD
    assert "top_k_groups" not in read.model_dump(mode="json")["model"]


def test_a_limit_on_groups_is_written_and_read() -> None:
    model = ModelSpec(name="m", layer_ids=(0,), num_experts=8, top_k=2, num_expert_groups=4, top_k_groups=2)
    meta = TraceMeta(form="tokens", model=model, recorder="x")
    assert TraceMeta.model_validate_json(meta.to_json()) == meta
    assert meta.model_dump(mode="json")["model"]["top_k_groups"] == 2
    with pytest.raises(InputError, match="top_k_groups 0"):
        ModelSpec(name="m", layer_ids=(0,), num_experts=8, top_k=2, top_k_groups=0)


@pytest.mark.parametrize(("hidden", "width", "found"), [(64, 2, 128), (None, 2, None), (64, None, None)])
def test_the_bytes_of_a_copy_are_known_where_both_its_sizes_are(
    hidden: int | None, width: int | None, found: int | None
) -> None:
    model = ModelSpec(name="m", layer_ids=(0,), num_experts=8, top_k=2, hidden_size=hidden, dtype_bytes=width)
    assert model.copy_bytes == found
    assert "copy_bytes" not in TraceMeta(form="tokens", model=model, recorder="x").model_dump(mode="json")["model"]
