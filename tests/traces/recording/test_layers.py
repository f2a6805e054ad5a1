"""Where the routing of a model shows, on modules of every shape."""

import re
from pathlib import Path

import pytest
from torch import Tensor, nn

from moeplan.errors import UsageError
from moeplan.traces.reader import open_trace
from moeplan.traces.recording.layers import MoELayer, hidden_layers, moe_layers


class Called(nn.Module):
    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return x + top_k_index + top_k_weights


def block(experts: nn.Module, **others: nn.Module) -> nn.Module:
    return nn.ModuleDict({"experts": experts, **others})


def test_experts_called_with_ids_are_watched_and_else_the_router_beside_them() -> None:
    model = nn.ModuleDict(
        {
            "layers": nn.ModuleList(
                [
                    nn.ModuleDict({"mlp": nn.Linear(2, 2)}),
                    nn.ModuleDict({"mlp": block(Called(), gate=nn.Linear(2, 2))}),
                    nn.ModuleDict({"mlp": block(nn.ModuleList([nn.Linear(2, 2)]), gate=nn.Linear(2, 2))}),
                    nn.ModuleDict({"mlp": block(nn.Linear(2, 2), router=nn.Linear(2, 2))}),
                    nn.ModuleDict({"mlp": block(nn.Linear(2, 2))}),
                ]
            )
        }
    )
    found = moe_layers(model)
    assert [(layer.name, layer.at_input) for layer in found] == [
        ("layers.1.mlp.experts", True),
        ("layers.2.mlp.gate", False),
        ("layers.3.mlp.router", False),
    ]
    assert hidden_layers(found) == (1, 2, 3)


def test_a_model_without_experts_is_refused_with_names_that_may_be_meant() -> None:
    model = nn.ModuleDict({"my_gate": nn.Linear(2, 2)})
    with pytest.raises(UsageError, match=r"ModuleDict has no MoE layer.*\(pattern=, or --router.*my_gate"):
        moe_layers(model)


def test_a_pattern_matches_the_names_inside_a_model_wrapped_for_data_parallelism() -> None:
    inner = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"router": nn.Linear(2, 2)})])})
    whole = nn.ModuleDict({"module": inner})
    for pattern in (r"layers\.\d+\.router", r"module\.layers\.\d+\.router"):
        assert [layer.name for layer in moe_layers(whole, pattern)] == ["module.layers.0.router"]
    other = nn.ModuleDict({"module": inner, "head": nn.Linear(2, 2)})
    with pytest.raises(UsageError, match="matches no module"):
        moe_layers(other, r"layers\.\d+\.router")


def test_the_example_of_the_documentation_records_a_model_without_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[3] / "docs/recording.md").read_text()
    (example,) = (block for block in re.findall("```python\n(.*?)```", text, re.DOTALL) if "class Layer" in block)
    exec(example, {"__name__": "example"})
    trace = open_trace("traces")
    assert (trace.num_tokens, trace.model.num_layers, trace.model.name) == (128, 2, "mine")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("model.layers.3.mlp.experts", "model.layers.5.mlp.experts"), (3, 5)),
        (("h4.experts", "h9.experts"), (0, 1)),
        (("stages.0.layers.1.moe", "stages.1.layers.0.moe"), (0, 1)),
        (("2.moe", "7.moe"), (2, 7)),
        (("experts",), (0,)),
    ],
)
def test_the_hidden_layer_is_the_last_number_of_a_name_where_those_ascend(
    names: tuple[str, ...], expected: tuple[int, ...]
) -> None:
    assert hidden_layers([MoELayer(name, nn.Identity()) for name in names]) == expected
