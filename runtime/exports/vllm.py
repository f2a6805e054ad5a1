"""vLLM and vllm-ascend: a plan's rows by a plugin, as vllm#49572 would read them, or device by device from a file."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from shlex import quote
from types import MappingProxyType
from typing import Any

from ...errors import UsageError
from ...files import read_json, read_text
from ...profilers.cluster import Cluster
from ...solvers.replicas import ReplayRule
from ...traces.model import ModelSpec
from ..plan import Plan
from .carried import main_rows, placed
from .engine import MAX_BYTES, SIDECAR, Expected, Exported, Lack, model_findings, row_findings, shown

MODULE = "moeplan_vllm_plan"
GROUP = "[vllm.general_plugins]"
MAX_TEXT_BYTES = 64 * 2**10
WITHOUT_EPLB = {
    "dbrx": "DBRX",
    "gpt_oss": "gpt-oss",
    "granitemoe": "Granite-MoE",
    "jamba": "Jamba",
    "minimax_m2": "MiniMax-M2",
    "olmoe": "OLMoE",
    "phimoe": "Phi-MoE",
    "qwen2_moe": "Qwen2-MoE",
}
CONDITIONS = (
    "the plan comes into force at the first rearrangement, step_interval / 4 engine steps after the start (750 unless"
    " --eplb-config says otherwise), and stays: every later one asks the same policy",
    "vLLM only logs what goes wrong in a plugin, and VLLM_PLUGINS filters it out unless it names moeplan_plan: look for"
    " 'moeplan: placement of' in the log of every worker",
    "of another number of MoE layers, experts, slots or ranks (draft models, pipeline stages, elastic scaling) the"
    " engine's own policy decides, with a warning",
    "the default --all2all-backend, allgather_reducescatter, moves the same bytes whatever the placement: only"
    " imbalance is saved; with deepep_high_throughput and its like traffic, too",
    "models without EPLB in vLLM (gpt-oss, Qwen2-MoE, OLMoE, Granite-MoE, Phi-MoE) ignore the file",
    "on ROCm with use_async false a rearrangement that gains under 5 % is skipped, and the plan may never apply",
)
ASCEND_CONDITIONS = (
    "only model runner v1 reads the map, hence VLLM_USE_V2_MODEL_RUNNER=0; v2 rejects it, and the engine announces that"
    " the map will go",
    "no benefit expected, by the engine's own guide, for prefill of inputs under 1,024 tokens, for decode with more"
    " than 8 experts a die (16 on 950DT) or under 128 tokens a die",
    "an A2 takes no redundant experts; 950 products none with W4A8MXFP4, W4A16 and W4A16MXFP4",
    "MTP layers keep the engine's own map; num_redundant_experts is read off the file: do not give it beside",
    "every rank draws one replica of an expert that it does not hold at random, once, when it starts",
)


class VLLM:
    """vLLM: rows of the MoE layers by ordinal, in a JSON list that the plugin beside it reads.

    vLLM reads no map from a file. What it has is a table of balancing policies, and plugins that it loads in every
    process; `vllm_plugin.py` puts a policy there that returns the rows as if they had been balanced just now. The same
    rows are what `initial_expert_map_path` of vllm#49572 would read.
    """

    name = "vllm"
    version = "0.33.0"
    replica_rule: ReplayRule | None = "even"
    splits: Mapping[str, str] = MappingProxyType({})
    fills = False
    file = "expert_map.json"
    carries = frozenset({"placement"})
    trains = False
    lacks: tuple[Lack, ...] = (Lack("no EPLB", "ignores the file", WITHOUT_EPLB),)
    runs_on = ""

    def export(self, plan: Plan, model: ModelSpec, directory: Path, rule: str | None) -> Exported:
        """The rows, the plugin's module and the distribution that names it."""
        placement = placed(plan, self.name)
        if ":" in str(directory):
            raise UsageError(f"{directory}: a path with a colon cannot stand in PYTHONPATH; choose another directory")
        distribution = f"{MODULE}-{plan.moeplan_version}.dist-info"
        metadata = f"Metadata-Version: 2.1\nName: {MODULE}\nVersion: {plan.moeplan_version}\n"
        redundant = placement.num_slots - model.num_experts
        command = (
            f'PYTHONPATH={quote(str(directory))}"${{PYTHONPATH:+:$PYTHONPATH}}" vllm serve "${{MODEL:?}}"'
            f" {_parallel_flags(plan.cluster)} --enable-expert-parallel --enable-eplb"
            f" --eplb-config {quote(json.dumps({'num_redundant_experts': redundant}))}"
        )
        written = {
            self.file: json.dumps(main_rows(placement, model)) + "\n",
            f"{MODULE}.py": files(__package__).joinpath("vllm_plugin.py").read_text(encoding="utf-8"),
            f"{distribution}/METADATA": metadata,
            f"{distribution}/entry_points.txt": f"{GROUP}\nmoeplan_plan = {MODULE}:register\n",
        }
        return Exported(written, command, CONDITIONS)

    def findings(self, path: Path, expected: Expected) -> Iterator[str]:
        """Faults that vllm#49572 or the plugin would refuse; of a directory, also what hides the plugin from vLLM."""
        yield from model_findings(self, expected)
        if path.name == self.file and any(path.with_name(name).exists() for name in (SIDECAR, f"{MODULE}.py")):
            yield from _of_plugin(path.parent, expected)
        value = read_json(path, what="an expert map of vLLM", max_bytes=MAX_BYTES)
        rows, wanted = value, expected.model.num_layers
        if isinstance(value, list) and value and not any(isinstance(row, list) for row in value):
            rows = [value]  # one map for all layers
            if path.with_name(f"{MODULE}.py").exists():
                yield f"one row for all layers, which vllm#49572 takes and {MODULE}.py does not; expected {wanted} rows"
        elif not isinstance(value, list) or len(value) != wanted:
            yield f"{shown(value)}; expected a list of {wanted} rows, one an MoE layer, or one row for all"
            return
        yield from row_findings({f"layer {layer}": row for layer, row in enumerate(rows)}, expected)


class VLLMAscend:
    """vllm-ascend: the JSON of `expert_map_path`, read by model runner v1 when experts are loaded.

    Rows are cut into devices, by ordinal of the MoE layers; every device of every layer holds as many experts.
    """

    name = "vllm-ascend"
    version = "06c3fc8"
    replica_rule: ReplayRule | None = "static"
    splits: Mapping[str, str] = MappingProxyType({})
    fills = False
    file = "expert_map.json"
    carries = frozenset({"placement"})
    trains = False
    lacks: tuple[Lack, ...] = ()
    runs_on = "Ascend NPUs"

    def export(self, plan: Plan, model: ModelSpec, directory: Path, rule: str | None) -> Exported:
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
            f'VLLM_USE_V2_MODEL_RUNNER=0 vllm serve "${{MODEL:?}}" {_parallel_flags(plan.cluster)}'
            f" --enable-expert-parallel --additional-config {quote(config)}"
        )
        return Exported({self.file: text}, command, ASCEND_CONDITIONS)

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
        yield from row_findings(rows, replace(expected, num_devices=devices))


def _parallel_flags(cluster: Cluster) -> str:
    """Data parallelism over all devices, rank by rank as the plan counts them."""
    if cluster.num_nodes == 1:
        return f"--data-parallel-size {cluster.num_devices}"
    local = cluster.devices_per_node
    return (
        f"--data-parallel-size {cluster.num_devices} --data-parallel-size-local {local}"
        f" --data-parallel-start-rank $((${{NODE_RANK:?}} * {local}))"
        ' --data-parallel-address "${HEAD:?}" --data-parallel-rpc-port 13345'
        ' $([ "$NODE_RANK" = 0 ] || echo --headless)'
    )


def _of_plugin(folder: Path, expected: Expected) -> Iterator[str]:
    """Why vLLM would not find the plugin in a folder on its PYTHONPATH, or the plugin would not answer."""
    files = sorted(folder.glob("*.dist-info/entry_points.txt"))[:8]
    texts = [read_text(file, what="entry points", max_bytes=MAX_TEXT_BYTES) for file in files]
    if not any(GROUP in text and f"{MODULE}:register" in text for text in texts):
        yield f"no *.dist-info/entry_points.txt names {MODULE}:register under {GROUP}; vLLM would not load the plugin"
    if not (folder / f"{MODULE}.py").is_file():
        yield f"no {MODULE}.py beside it; vLLM would not load the plugin"
    if not (folder / SIDECAR).is_file():
        yield f"no {SIDECAR} beside it, from which the plugin reads the number of devices"
        return
    said = read_json(folder / SIDECAR, what="what moeplan apply wrote", max_bytes=MAX_TEXT_BYTES)
    devices = said.get("num_devices") if isinstance(said, dict) else None
    if type(devices) is not int or devices != (expected.num_devices or devices):
        yield f"{SIDECAR} says num_devices {shown(devices)}; expected the ranks that will ask, {expected.num_devices}"


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
