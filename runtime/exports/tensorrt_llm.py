"""TensorRT-LLM: the YAML of `moe_config.load_balancer`, by hidden layer, and the options that name it.

YAML and not JSON, whose keys are text: the engine looks layers up by number.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from shlex import quote
from types import MappingProxyType
from typing import Any

from ...files import read_yaml
from ...solvers.replicas import ReplayRule
from ...traces.model import MAX_SIZE, ModelSpec
from ..plan import Plan
from .carried import contiguous, num_hidden_layers, placed, rows_by_hidden_layer
from .engine import Expected, Exported, Lack, listed, model_findings, row_findings, shown

MAX_YAML_BYTES = 2**20  # 61 layers of 288 slots take 85 kB
KEYS = ("num_slots", "initial_global_assignments", "layer_updates_per_iter")
OPTIONS = "extra_config.yaml"
CONDITIONS = (
    "without attention data parallelism (enable_attention_dp) and more than one expert-parallel rank the file is"
    " ignored without a word, and so it is with moe_cluster_parallel_size above 1",
    "architectures that the engine does not list ignore it, or stop at num_local_slots; listed are DeepSeek-V3, V3.2"
    " and V4, GLM MoE DSA, GPT-OSS, Kimi K2.5, Mixtral, Llama 4, Nemotron-H, Qwen2, Qwen3 and Qwen3.5 MoE",
    "the MoE backends VANILLA, TRITON and MARLIN have no load balancer; releases that still have WIDEEP want"
    " moe_config.backend: WIDEEP",
    "EXPERT_STATISTIC_ITER_RANGE slows every step: unset it when recording is done",
)
UNLISTED = {  # of the families that other engines are known to lack something for
    "dbrx": "DBRX",
    "granitemoe": "Granite-MoE",
    "jamba": "Jamba",
    "olmoe": "OLMoE",
    "phimoe": "Phi-MoE",
}
UNTOLD = (
    "the plan does not say whether the model has MTP layers; one that has stops with a KeyError unless they are in the"
    " file: give --hf-config config.json"
)


class TensorRTLLM:
    """A file with one row for every MoE layer, those of MTP too, and exactly three keys; 0 layers a step are moved."""

    name = "tensorrt-llm"
    version = "1.3.0rc27"
    replica_rule: ReplayRule | None = "round_robin"
    splits: Mapping[str, str] = MappingProxyType({})
    fills = False
    file = "moe_load_balancer.yaml"
    carries = frozenset({"placement"})
    trains = False
    lacks: tuple[Lack, ...] = (Lack("no load balancer", "ignores the file or stops", UNLISTED),)
    runs_on = ""

    def export(self, plan: Plan, model: ModelSpec, directory: Path, rule: str | None) -> Exported:
        """Rows by hidden layer; MTP layers that were not planned hold expert i mod E in slot i."""
        placement = placed(plan, self.name)
        rows = rows_by_hidden_layer(placement, model)
        for layer in _mtp_layers(model, num_hidden_layers(model, self.name)):
            rows.setdefault(layer, contiguous(placement.num_slots, model.num_experts))
        assignments = "".join(f"  {layer}: {row}\n" for layer, row in sorted(rows.items()))
        text = (
            f"num_slots: {placement.num_slots}\ninitial_global_assignments:\n{assignments}layer_updates_per_iter: 0\n"
        )
        path = json.dumps(str(directory / self.file), ensure_ascii=False)
        options = f"enable_attention_dp: true\nmoe_config:\n  load_balancer: {path}\n"
        devices, cluster = placement.num_devices, plan.cluster
        several = f"srun -N {cluster.num_nodes} --ntasks-per-node {cluster.devices_per_node} --mpi=pmix"
        command = (
            f"{f'{several} trtllm-llmapi-launch ' if cluster.num_nodes > 1 else ''}"
            f'trtllm-serve "${{MODEL:?}}" --tp_size {devices} --ep_size {devices}'
            f" --extra_llm_api_options {quote(str(directory / OPTIONS))}"
        )
        untold = (UNTOLD,) if model.num_mtp_layers is None else ()
        return Exported({self.file: text, OPTIONS: options}, command, CONDITIONS + untold)

    def findings(self, path: Path, expected: Expected) -> Iterator[str]:
        """Faults that TensorRT-LLM would refuse, and entries that it would look up in vain."""
        yield from model_findings(self, expected)
        value = read_yaml(path, what="a load balancer of TensorRT-LLM", max_bytes=MAX_YAML_BYTES)
        if not isinstance(value, dict) or set(value) != set(KEYS):
            yield f"{_keys(value)}; expected exactly {', '.join(KEYS)}"
        if not isinstance(value, dict):
            return
        updates = value.get("layer_updates_per_iter", 0)
        if type(updates) is not int or updates != 0:
            yield f"layer_updates_per_iter {shown(updates)}; expected 0, else the engine moves experts off the plan"
        num_slots, rows = value.get("num_slots"), value.get("initial_global_assignments")
        if type(num_slots) is not int or not 1 <= num_slots <= MAX_SIZE:
            yield f"num_slots {shown(num_slots)}; expected a number of slots per layer"
        elif not isinstance(rows, dict):
            yield f"initial_global_assignments is {shown(rows)}; expected an object of rows by hidden layer"
        else:
            yield from _of_layers(rows, expected.model)
            yield from row_findings(
                {f"hidden layer {shown(layer)}": row for layer, row in rows.items()}, expected, width=num_slots
            )


def _mtp_layers(model: ModelSpec, first: int) -> range:
    return range(first, first + (model.num_mtp_layers or 0))


def _of_layers(rows: dict[Any, Any], model: ModelSpec) -> Iterator[str]:
    """Layers by other names than the engine's, missing ones and those of no experts."""
    if strange := [key for key in rows if type(key) is not int]:
        yield f"layer {shown(strange[0])} ({len(strange)} such); expected the number of a hidden layer"
    wanted = {*model.layer_ids, *_mtp_layers(model, model.num_hidden_layers or 0)}
    numbered = {key for key in rows if type(key) is int}
    if absent := sorted(wanted - numbered):
        yield f"without hidden layer {listed(absent)}: the engine stops with a KeyError; MTP layers belong to it"
    if unknown := sorted(numbered - wanted):
        yield f"hidden layer {listed(unknown)} has no experts in this model"


def _keys(value: Any) -> str:
    names: Iterable[str] = sorted(map(shown, value))[:6] if isinstance(value, dict) else ()
    return f"keys {', '.join(names) or 'none'}" if isinstance(value, dict) else shown(value)
