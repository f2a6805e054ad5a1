"""The command or the call that comes next, once a plan is solved, applied or replayed."""

import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ...errors import MoeplanError
from ...runtime.exports import ENGINES, PERMUTED, engines_of, prepared, titled
from ...runtime.plan import Plan
from ..options import EvaluationOptions
from ..replay.result import Replayed
from ..strategies.registry import chosen_by, decided_by
from .answer import NOTHING_TO_GAIN, WORSE, carried, doubt

RUNTIME_ALONE = ", in moeplan.runtime alone; for engines: moeplan solve --engine NAME"


def after_solve(plan: Plan, path: Path) -> str:
    """The command that carries a plan out; for a plan that does not pay, what else to try."""
    chosen, verdict, flags = chosen_by(plan), plan.verdict, _flags(plan)
    carry_out = f"{_apply(path)}{flags or ''}"
    if verdict is None or verdict.value == "benefit":
        if flags is not None:
            serves = verdict is not None and EvaluationOptions.of(plan).use != "training"
            return carry_out + RUNTIME_ALONE * (serves and not engines_of(plan))
    elif verdict.gain.low is None and verdict.gain.value > 0:  # one step: `apply` leaves it to the user
        return f"record more, or {carry_out}"
    if doubt(plan) in (NOTHING_TO_GAIN, WORSE):
        others = "" if chosen else "; moeplan solve without --strategy tries all"
        return f"nothing to apply: keep what runs today{others}"
    return "nothing to apply: record more, and solve again"


def after_apply(plan: Plan, path: Path) -> str:
    """The call that runs the active plan, and the command that writes it for the engines that can."""
    training = EvaluationOptions.use_in(plan) == "training"
    engines = [name for name in engines_of(plan) if ENGINES[name].trains or not training]
    other = f", or {_apply(path)} --engine {'|'.join(engines)} -o DIR" if engines else ""
    return f"next: moeplan.runtime.load_plan() in your loop{other}"


def per_engine(plan: Plan, path: Path) -> dict[str, str]:
    """The command that gives the plan to each engine, or why there is none."""
    from ...runtime.checkpoints.permutation import permutation_of

    training, rows, apply = EvaluationOptions.use_in(plan) == "training", dict[str, str](), _apply(path)
    forced = " --force" if needs_force(plan) else ""
    anyway = "nothing to apply" if forced or _flags(plan) is None else ""
    rows["moeplan.runtime"] = anyway or f"{apply}, then moeplan.runtime.load_plan() in your loop"
    with tempfile.TemporaryDirectory() as folder:
        for name, engine in ENGINES.items():
            try:
                prepared(plan, name, Path(folder) / name)
            except MoeplanError as error:
                rows[titled(engine)] = f"refused: {error}"
                continue
            less, serves = carried(plan, engine), "it serves, and the plan was judged for training"
            notes = "; ".join(filter(None, (less, serves if training and not engine.trains else "")))
            rows[titled(engine)] = f"{apply} --engine {name} -o DIR{forced}{notes and f' ({notes})'}"
    try:
        permutation_of(plan, plan.model)
        left = [name.replace("_", " ") for name in plan.decisions.names if name != "placement"]
        left += [f"{plan.dispatch_model} dispatch"] * (plan.dispatch_model != "standard")
        notes = f" (without the plan's {' and '.join(left)})" if left else ""
        rows[", ".join(PERMUTED)] = f"{apply} --checkpoint MODEL_DIR -o OUT_DIR{forced}{notes}"
    except MoeplanError as error:
        rows[", ".join(PERMUTED)] = f"refused: {error}"
    return rows


def needs_force(plan: Plan) -> bool:
    """Check whether `moeplan apply` refuses a plan whose own verdict, with an interval, is that it does not pay."""
    return plan.verdict is not None and plan.verdict.value == "none" and plan.verdict.gain.low is not None


def after_replay(done: Replayed, plans: Mapping[str, Plan], *, more_rounds: int | None) -> str:
    """The command that carries out the plan that gained most here, whatever its own verdict; else what to try."""
    if done.gaining:
        path, *_ = done.gaining
        return _apply(Path(path)) + (_flags(plans[path]) or "") + " --force" * needs_force(plans[path])
    if done.undecided and done.noisy:
        return "again when this machine is quiet; until then keep what runs today"
    if done.undecided and more_rounds is not None:
        return f"again with --rounds {more_rounds}, which shows smaller gains; until then keep what runs today"
    return "nothing to apply: keep what runs today"


def _apply(path: Path) -> str:
    return f"moeplan apply {shlex.quote(str(path))}"


def _flags(plan: Plan) -> str | None:
    """Flags of `moeplan apply` that carry a plan out; None where it is better not carried out."""
    flags = [strategy.apply_flags(plan) for strategy in (*reversed(chosen_by(plan)), *reversed(decided_by(plan)))]
    return None if None in flags else "".join(filter(None, flags))
