"""vllm-ascend: the JSON of `expert_map_path`, device by device, read by model runner v1 when experts are loaded."""

import json
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import Any

from ...files import read_json
from ...traces.model import ModelSpec
from ..plan import Plan
from .carried import main_rows, placed
from .engine import MAX_BYTES, Expected, Exported
from .rows import row_findings, shown
from .vllm import parallel_flags

__all__ = ["VLLMAscend"]

CONDITIONS = (
    "only model runner v1 reads the map, hence VLLM_USE_V2_MODEL_RUNNER=0; v2 rejects it, and the engine announces that"
    " the map will go",
    "no benefit expected, by the engine's own guide, for prefill of inputs under 1,024 tokens, for decode with more"
    " than 8 experts a die (16 on 950DT) or under 128 tokens a die",
    "an A2 takes no redundant experts; 950 products none with W4A8MXFP4, W4A16 and W4A16MXFP4",
    "MTP layers keep the engine's own map; num_redundant_experts is read off the file: do not give it beside",
    "every rank draws one replica of an expert that it does not hold at random, once, when it starts",
)


class VLLMAscend:
    """Rows cut into devices, by ordinal of the MoE layers; every device of every layer holds as many experts."""

    name = "vllm-ascend"
    version = "06c3fc8"
    replica_rule: str | None = "static"
    file = "expert_map.json"

    def export(self, plan: Plan, model: ModelSpec, directory: Path) -> Exported:
        """The experts of every device of every MoE layer."""
        placement = placed(plan, self.name)
        devices, slots = placement.num_devices, placement.num_slots // placement.num_devices
        layers = [
            {
                "layer_id": layer,
                "device_count": devices,
                "device_list": [
                    {"device_id": device, "device_expert": row[device * slots : (device + 1) * slots]}
                    for device in range(devices)
                ],
            }
            for layer, row in enumerate(main_rows(placement, model))
        ]
        text = json.dumps({"moe_layer_count": len(layers), "layer_list": layers}) + "\n"
        config = json.dumps({"eplb_config": {"expert_map_path": str(directory / self.file)}}, ensure_ascii=False)
        command = (
            f'VLLM_USE_V2_MODEL_RUNNER=0 vllm serve "${{MODEL:?}}" {parallel_flags(plan.cluster)}'
            f" --enable-expert-parallel --additional-config {quote(config)}"
        )
        return Exported({self.file: text}, command, CONDITIONS)

    def findings(self, path: Path, expected: Expected) -> Iterator[str]:
        """Faults that vllm-ascend would refuse or place wrongly."""
        value = read_json(path, what="an expert map of vllm-ascend", max_bytes=MAX_BYTES)
        layers = value.get("layer_list") if isinstance(value, dict) else None
        if not isinstance(value, dict) or not isinstance(layers, list):
            yield f"{shown(value)} without layer_list; expected moe_layer_count and a list of layers"
            return
        wanted = expected.model.num_layers
        if value.get("moe_layer_count") != wanted or len(layers) != wanted:
            yield (
                f"moe_layer_count {shown(value.get('moe_layer_count'))} and {len(layers)} layers; expected {wanted},"
                " the MoE layers without those of MTP"
            )
        devices = expected.num_devices or _first_devices(layers)
        rows: dict[str, Any] = {}
        for ordinal, layer in enumerate(layers):
            yield from _of_layer(ordinal, layer, devices, rows)
        yield from row_findings(rows, Expected(model=expected.model, num_devices=devices, redundant=expected.redundant))


def _first_devices(layers: list[Any]) -> int:
    """The number of devices of the first layer, where nobody said how many there are."""
    first = layers[0].get("device_list") if layers and isinstance(layers[0], dict) else None
    return max(1, len(first)) if isinstance(first, list) else 1


def _of_layer(ordinal: int, layer: Any, devices: int, rows: dict[str, Any]) -> Iterator[str]:
    """Faults of a layer's form; the row of a layer without any goes into `rows`."""
    name = f"layer {ordinal}"
    held = layer.get("device_list") if isinstance(layer, dict) else None
    if not isinstance(layer, dict) or not isinstance(held, list):
        yield f"{name}: {shown(layer)} without device_list"
        return
    if layer.get("layer_id") != ordinal:
        yield f"{name}: layer_id {shown(layer.get('layer_id'))}; expected {ordinal}: the engine takes layers by place"
    if len(held) != devices or layer.get("device_count") != devices:
        yield f"{name}: device_count {shown(layer.get('device_count'))} and {len(held)} devices; expected {devices}"
        return
    if strange := [rank for rank, device in enumerate(held) if not isinstance(_experts(device), list)]:
        yield f"{name}: device {strange[0]} has no list device_expert"
        return
    lists: list[list[Any]] = list(map(_experts, held))
    if wrong := [rank for rank, device in enumerate(held) if device.get("device_id") != rank]:
        yield f"{name}: device_id {shown(held[wrong[0]].get('device_id'))} in place {wrong[0]}; expected its place"
    lengths = sorted({len(experts) for experts in lists})
    if len(lengths) > 1:
        yield f"{name}: devices hold {lengths[0]} to {lengths[-1]} experts; expected as many on each"
        return
    rows[name] = [expert for experts in lists for expert in experts]


def _experts(device: Any) -> Any:
    return device.get("device_expert") if isinstance(device, dict) else None
