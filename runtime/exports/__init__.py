"""Files that carry a plan into a serving engine or trainer, and the rules such files obey, whoever wrote them."""

import json
import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

from ...errors import UsageError
from ...files import atomic_directory, check_target
from ...solvers.placement import BY_STEP
from ...traces.model import ModelSpec
from ..plan import Plan
from .carried import described
from .engine import PERMUTE, SIDECAR, Engine, Expected, Exported, family_of, rule_of, titled, unserved
from .sglang import SGLang
from .tensorrt_llm import TensorRTLLM
from .tutel import Tutel
from .vllm import VLLM, VLLMAscend

__all__ = [
    "ENGINES",
    "PERMUTE",
    "SIDECAR",
    "Engine",
    "Expected",
    "Exported",
    "engine_named",
    "engines_of",
    "export",
    "family_of",
    "prepared",
    "strays",
    "titled",
    "unserved",
    "validate",
    "write",
]

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
        raise UsageError(f"{name} takes no placement from a file; {PERMUTE}")
    if name not in ENGINES:
        raise UsageError(f"engine {name!r}; expected one of {', '.join(ENGINES)}")
    return ENGINES[name]


def strays(engine: Engine, plan: Plan) -> str:
    """Words for what an engine's tokens do otherwise with replicas than the plan was judged by; empty where nothing."""
    if plan.fills and not engine.fills:
        return "it computes shared experts at home, not where there is room"
    judged = plan.judged_by
    if judged in (None, "even", engine.replica_rule):
        return ""
    if judged in BY_STEP:
        return "" if rule_of(engine, plan) == "lp" else "it does not split steps exactly"
    if judged == "nearest":
        return "" if engine.replica_rule == "static" else "its tokens do not use the nearest replica"
    return f"it chooses replicas by the rule {engine.replica_rule}, not by {judged}"


def engines_of(plan: Plan) -> tuple[str, ...]:
    """Engines whose files carry all decisions of a plan for its model, and choose replicas as it was judged."""
    if plan.dispatch_model != "standard" or plan.decisions.wire is not None:
        return ()
    able = (name for name, one in ENGINES.items() if {*plan.decisions.names} <= one.carries and not strays(one, plan))
    return tuple(name for name in able if not unserved(ENGINES[name], plan.model))


def export(
    plan: Plan,
    engine: str,
    directory: str | os.PathLike[str],
    *,
    config: ModelSpec | None = None,
    model_type: str | None = None,
) -> Exported:
    """Write the files of a plan for an engine into a directory; parameters and errors as in `prepared` and `write`."""
    exported = prepared(plan, engine, directory, config=config, model_type=model_type)
    write(exported, directory)
    return exported


def prepared(
    plan: Plan,
    engine: str,
    directory: str | os.PathLike[str],
    *,
    config: ModelSpec | None = None,
    model_type: str | None = None,
) -> Exported:
    """The files of a plan for an engine, sound by its rules (`validate`), for `write` to put into `directory`.

    Parameters
    ----------
    config
        The model as its config.json describes it, for what the plan does not know: dense layers, and those of MTP.
    model_type
        Of that config.json; engines ignore the files of some.

    Raises
    ------
    UsageError
        The engine cannot carry the plan out, or would refuse or ignore the files, or there is something at `directory`.
    MismatchError
        The config.json is of another model.
    StorageError
        It cannot be written.
    """
    chosen, target = engine_named(engine), Path(directory).absolute()
    if not str(target).isprintable():
        raise UsageError(f"{target}: a path that does not print cannot be pasted; choose another directory")
    if plan.decisions.wire is not None:
        raise UsageError(
            f"the plan sends hidden vectors as {plan.decisions.wire} rows, and {engine} in a form of its own; make one"
            " without --wire"
        )
    model = described(plan, config)
    rule = rule_of(chosen, plan, model_type)
    exported = replace(chosen.export(plan, model, target, rule), replica_rule=rule)
    if chosen.replica_rule is not None and plan.decisions.pipeline is not None:
        exported = replace(exported, conditions=(*exported.conditions, UNCARRIED))
    exported = replace(exported, files={**exported.files, SIDECAR: _sidecar(plan, chosen, exported)})
    with tempfile.TemporaryDirectory() as folder:
        _put(exported, Path(folder))
        finding = next(chosen.findings(Path(folder) / chosen.file, _expected(plan, model, model_type)), None)
    if finding is not None:
        raise UsageError(f"{engine} cannot be given this plan: {finding}")
    check_target(target, directory=True)
    return exported


def write(exported: Exported, directory: str | os.PathLike[str]) -> None:
    """Write files into the directory that they were `prepared` for, which appears whole or not at all.

    Raises
    ------
    UsageError
        There is something.
    StorageError
        It cannot be written.
    """
    with atomic_directory(Path(directory).absolute()) as folder:
        _put(exported, folder)


def validate(path: str | os.PathLike[str], engine: str, expected: Expected) -> list[str]:
    """Faults that an engine would refuse in a file, or take and do wrong, one line each; none where it is sound.

    Parameters
    ----------
    path
        Anybody's file, or a directory that `export` wrote.

    Raises
    ------
    InputError
        The file cannot be read as one of that engine at all.
    UsageError
        There is no such engine.
    """
    chosen = engine_named(engine)
    file = Path(path) / chosen.file if os.path.isdir(path) else Path(path)
    findings = list(islice(chosen.findings(file, expected), MAX_FINDINGS + 1))
    return findings if len(findings) <= MAX_FINDINGS else [*findings[:MAX_FINDINGS], "and more"]


def _put(exported: Exported, folder: Path) -> None:
    for name, text in exported.files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def _expected(plan: Plan, model: ModelSpec, model_type: str | None) -> Expected:
    """Model that the files of a plan are validated for: layers of MTP are none of its own."""
    main = tuple(layer for layer in model.layer_ids if layer < (model.num_hidden_layers or math.inf))
    redundant = None if plan.placement is None else plan.placement.num_slots - model.num_experts
    own = replace(model, layer_ids=main)
    return Expected(model=own, model_type=model_type, num_devices=plan.cluster.num_devices, redundant=redundant)


def _sidecar(plan: Plan, engine: Engine, exported: Exported) -> str:
    """Description of the files and of their use, as JSON; the plugin for vLLM reads the devices from it."""
    said = {
        "engine": engine.name,
        "engine_version": engine.version,
        "replica_rule": exported.replica_rule,
        "plan_sha256": plan.plan_sha256,
        "moeplan_version": plan.moeplan_version,
        "model": plan.model.name,
        "num_devices": plan.cluster.num_devices,
        "command": exported.command,
        "conditions": exported.conditions,
    }
    return json.dumps(said, indent=1) + "\n"
