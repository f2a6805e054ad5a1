"""Files that carry a plan into a serving engine or trainer, and the rules such files obey, whoever wrote them."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

from ...errors import UsageError
from ...files import atomic_directory
from ...traces.model import ModelSpec
from ..plan import Plan
from .carried import described
from .engine import SIDECAR, Engine, Expected, Exported
from .sglang import SGLang
from .tensorrt_llm import TensorRTLLM
from .tutel import Tutel
from .vllm import VLLM, VLLMAscend

__all__ = ["ENGINES", "SIDECAR", "Engine", "Expected", "Exported", "engine_named", "export", "validate"]

MAX_FINDINGS = 100
KINDS: tuple[Callable[[], Engine], ...] = (SGLang, VLLM, VLLMAscend, TensorRTLLM, Tutel)
ENGINES: dict[str, Engine] = {engine.name: engine for engine in (kind() for kind in KINDS)}
PERMUTED = ("megatron", "deepspeed", "fastmoe")  # they take no plan, only a checkpoint in its order
UNCARRIED = "the plan's pipeline degrees are not in the files: this engine chooses its own overlap"


def engine_named(name: str) -> Engine:
    """The engine of this name.

    Raises
    ------
    UsageError
        There is none, or it takes no files.
    """
    if name in PERMUTED:
        raise UsageError(
            f"{name} takes no placement from a file; permute the checkpoint instead: moeplan apply PLAN --checkpoint"
            " MODEL_DIR -o OUT_DIR"
        )
    if name not in ENGINES:
        raise UsageError(f"engine {name!r}; expected one of {', '.join(ENGINES)}")
    return ENGINES[name]


def export(plan: Plan, engine: str, directory: str | os.PathLike[str], *, config: ModelSpec | None = None) -> Exported:
    """Write the files of a plan for an engine into a directory, which appears whole or not at all.

    Parameters
    ----------
    config
        The model as its config.json describes it, for what the plan does not know: dense layers, and those of MTP.

    Raises
    ------
    UsageError
        The engine cannot carry the plan out, or there is something at `directory`.
    MismatchError
        The config.json is of another model.
    StorageError
        It cannot be written.
    """
    chosen, target = engine_named(engine), Path(directory).absolute()
    if not str(target).isprintable():
        raise UsageError(f"{target}: a path that does not print cannot be pasted; choose another directory")
    exported = chosen.export(plan, described(plan, config), target)
    if chosen.replica_rule is not None and plan.decisions.pipeline is not None:
        exported = replace(exported, conditions=(*exported.conditions, UNCARRIED))
    exported = replace(exported, files={**exported.files, SIDECAR: _sidecar(plan, chosen, exported)})
    with atomic_directory(target) as folder:
        for name, text in exported.files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
    return exported


def validate(path: str | os.PathLike[str], engine: str, expected: Expected) -> list[str]:
    """Faults that an engine would refuse in a file, or take and do wrong, one line each; none where it is sound.

    Parameters
    ----------
    path
        Anybody's file, or a directory that `export` wrote.

    Raises
    ------
    InputError
        It cannot be read as a file of that engine at all.
    UsageError
        There is no such engine.
    """
    chosen = engine_named(engine)
    file = Path(path) / chosen.file if os.path.isdir(path) else Path(path)
    findings = list(islice(chosen.findings(file, expected), MAX_FINDINGS + 1))
    return findings if len(findings) <= MAX_FINDINGS else [*findings[:MAX_FINDINGS], "and more"]


def _sidecar(plan: Plan, engine: Engine, exported: Exported) -> str:
    """Description of the files and of their use, as JSON; the plugin for vLLM reads the devices from it."""
    said = {
        "engine": engine.name,
        "engine_version": engine.version,
        "replica_rule": engine.replica_rule,
        "plan_sha256": plan.plan_sha256,
        "moeplan_version": plan.moeplan_version,
        "model": plan.model.name,
        "num_devices": plan.cluster.num_devices,
        "command": exported.command,
        "conditions": exported.conditions,
    }
    return json.dumps(said, indent=1) + "\n"
