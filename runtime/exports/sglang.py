"""SGLang: the JSON of `--init-expert-location`, read when the server starts; experts load straight into their slots."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import quote
from types import MappingProxyType

from ...files import read_json
from ...solvers.replicas import ReplayRule
from ...traces.model import ModelSpec
from ..plan import Plan
from .carried import contiguous, num_hidden_layers, placed, rows_by_hidden_layer
from .engine import MAX_BYTES, Expected, Exported, Lack, model_findings, row_findings, shown

KEY = "physical_to_logical_map"
WITHOUT_HOOK = {  # whose classes have no get_model_config_for_expert_location
    "ernie4_5_moe": "ERNIE 4.5",
    "granitemoe": "Granite-MoE",
    "granitemoehybrid": "Granite-MoE",
    "hunyuan_v1_moe": "Hunyuan-MoE",
    "llama4": "Llama 4",
    "llama4_text": "Llama 4",
    "mixtral": "Mixtral",
    "olmoe": "OLMoE",
    "phimoe": "Phi-MoE",
}
BY_LP = {  # families whose ranks without tokens take part in the sum that --ep-dispatch-algorithm lp begins with
    "deepseek_v2": "DeepSeek-V2",
    "deepseek_v3": "DeepSeek-V3",
    "deepseek_v32": "DeepSeek-V3.2",
    "glm4_moe_lite": "GLM-4 Lite",
    "glm_moe_dsa": "GLM DSA",
}
LP_CONDITION = (
    "lp draws replicas by the programme's shares, and a rank that holds an expert, or whose node does, keeps to that"
    " replica first: loads are the plan's up to this and to chance"
)
FILLING = (
    "--enable-waterfill is --enable-deepep-waterfill before 0.5.16; it is documented for DeepSeek-V3, R1 and V4: with"
    " other models see that the log says how many Waterfill TopK modules were prepared"
)
CONDITIONS = (
    "models without an expert-location hook (Mixtral, OLMoE, Llama 4, Granite-MoE, Phi-MoE, ERNIE 4.5) ignore the file"
    " without a word; gpt-oss stops at --moe-a2a-backend deepep",
    "--enable-eplb would replace the placement after --eplb-rebalance-num-iterations steps",
    "--ep-dispatch-algorithm static needs an all-to-all backend; with --moe-a2a-backend none the algorithm is dynamic,"
    " every device sees all tokens, and a placement saves no traffic, only imbalance",
    "draft (MTP) layers keep their experts in order",
    "to see the placement in force: SGLANG_LOG_EXPERT_LOCATION_METADATA=1",
)


class SGLang:
    """Rows of all hidden layers, dense ones too, and no key but one: any other stops the server at its start."""

    name = "sglang"
    version = "0.5.23"
    replica_rule: ReplayRule | None = "static"
    splits: Mapping[str, str] = MappingProxyType(BY_LP)
    fills = True
    file = "expert_location.json"
    carries = frozenset({"placement"})
    trains = False
    lacks: tuple[Lack, ...] = (
        Lack("no expert-location hook", "ignores the file", WITHOUT_HOOK),
        Lack("no all-to-all (deepep)", "stops at the start command's --moe-a2a-backend", {"gpt_oss": "gpt-oss"}),
    )
    runs_on = ""

    def export(self, plan: Plan, model: ModelSpec, directory: Path, rule: str | None) -> Exported:
        """The map of every hidden layer; dense ones hold expert i mod E in slot i."""
        placement = placed(plan, self.name)
        planned = rows_by_hidden_layer(placement, model)
        empty = contiguous(placement.num_slots, model.num_experts)
        rows = [planned.get(layer, empty) for layer in range(num_hidden_layers(model, self.name))]
        devices, nodes = placement.num_devices, plan.cluster.num_nodes
        several = f' --nnodes {nodes} --node-rank "${{NODE_RANK:?}}" --dist-init-addr "${{HEAD:?}}:25000"'
        fills = " --enable-waterfill" if plan.fills else ""
        command = (
            f'python -m sglang.launch_server --model-path "${{MODEL:?}}" --tp-size {devices} --ep-size {devices}'
            f" --moe-a2a-backend deepep --ep-dispatch-algorithm {rule}{fills}"
            f" --ep-num-redundant-experts {placement.num_slots - model.num_experts}"
            f" --init-expert-location {quote(str(directory / self.file))}{several if nodes > 1 else ''}"
        )
        conditions = (*([LP_CONDITION] if rule == "lp" else []), *([FILLING] if fills else []), *CONDITIONS)
        return Exported({self.file: json.dumps({KEY: rows}) + "\n"}, command, conditions)

    def findings(self, path: Path, expected: Expected) -> Iterator[str]:
        """Faults that SGLang would refuse, and those that it would take."""
        yield from model_findings(self, expected)
        value = read_json(path, what="an expert location of SGLang", max_bytes=MAX_BYTES)
        if not isinstance(value, dict) or KEY not in value:
            yield f"{shown(value)} without the key {KEY}; expected an object with it and no other"
            return
        if extra := sorted(set(value) - {KEY}):
            yield f"key {shown(extra[0])} ({len(extra)} too many); the server stops at any key but {KEY}"
        rows, layers = value[KEY], expected.model.num_hidden_layers
        if not isinstance(rows, list) or len(rows) != layers:
            yield f"{KEY} is {shown(rows)}; expected a list of {layers} rows, one a hidden layer, dense ones too"
            return
        yield from row_findings({f"hidden layer {layer}": row for layer, row in enumerate(rows)}, expected)
