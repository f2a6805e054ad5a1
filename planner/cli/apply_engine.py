"""Files and messages of `moeplan apply --engine`."""

from pathlib import Path
from typing import Any

from ...runtime.exports import ENGINES, export
from ...runtime.exports.sglang import SGLang, check_hook
from ...runtime.plan import Plan
from ...traces.huggingface.config import read_config, spec_of_config

__all__ = ["exported"]


def exported(plan: Plan, engine: str, output: Path, hf_config: Path | None) -> tuple[dict[str, Any], list[str]]:
    """Write a plan's files for an engine; what was written, as JSON with the command that starts it, and as lines."""
    if hf_config is not None and engine == SGLang.name:
        check_hook(read_config(hf_config)["model_type"])
    made = export(plan, engine, output, config=None if hf_config is None else spec_of_config(hf_config))
    rule, files = ENGINES[engine].replica_rule, list(made.files)
    lines = [f"wrote     {output}    {', '.join(files)}"]
    if plan.verdict is not None and plan.verdict.value == "none":
        lines.append("verdict   no benefit expected: the plan's own figures show none")
    placement = plan.placement
    if rule is not None and placement is not None and placement.has_replicas:
        judged = (
            f"the plan was judged by {placement.replica_rule}: moeplan compare PLAN --replica-rule {rule} replays it"
        )
        lines.append(
            f"replicas  chosen by the rule {rule}{'' if rule == placement.replica_rule else f', and {judged}'}"
        )
    lines += [f"note      {condition}" for condition in made.conditions]
    told = {
        "engine": engine,
        "directory": str(output),
        "files": files,
        "replica_rule": rule,
        "command": made.command,
        "conditions": list(made.conditions),
    }
    return told, lines
