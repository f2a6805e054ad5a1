"""Which seconds a plan must have, given what it says times them; checked without trace and profile."""

import re
from collections.abc import Set

from ...errors import CertificationError
from ...runtime.plan import Contender, Plan
from .structure import seconds_options

__all__ = ["check_timing"]

SIZE = r"the model's [a-z_ ]+ (is not in the trace|or dtype is not known)"
COUNTS = "counts do not say where tokens are"
LINK = r"no all_to_all of \d+ ranks and no (intra|inter) link; give --link \2=GBps:us"
REASONS = {  # why a part may have no seconds
    "dispatch": rf"{SIZE}|{LINK}|{COUNTS}",
    "kv": rf"{SIZE}|{LINK.replace('all_to_all', 'all_gather')}|{COUNTS}",
    "experts": rf"{SIZE}|no profile|the profile has no expert_ffn",
    "attention": (
        rf"{SIZE}|no profile|the profile has no attention|the trace has no samples, hence no contexts|{COUNTS}"
    ),
}
METRICS = {
    "dispatch": ("dispatch_s", "combine_s"),
    "kv": ("kv_s",),
    "experts": ("experts_s",),
    "attention": ("attention_s",),
}


def check_timing(plan: Plan) -> None:
    """Refuse a plan that hides seconds it could tell, tells others, or tells impossible ones."""
    could = plan.inputs.profile is not None or bool(plan.cluster.links)
    if ("seconds" in plan.options) != could:
        raise CertificationError(
            f"{'no' if could else 'with'} options.seconds in a plan made {'with' if could else 'without'} profile or"
            " links; re-run moeplan solve"
        )
    assert plan.evaluation is not None
    timed = _timed(plan)
    for part in filter(None, (plan.evaluation.fit, plan.evaluation.held_out)):
        for contender in part.contenders:
            _check_contender(plan, contender, timed)


def _timed(plan: Plan) -> set[str]:
    """The parts that the plan names a source of; with what is missing they are all parts there are."""
    if "seconds" not in plan.options:
        return set()
    seconds = seconds_options(plan)
    timed = {source.split()[0] for source in seconds.sources if source}
    if timed & set(seconds.missing) or timed | set(seconds.missing) != set(METRICS):
        raise CertificationError(
            f"options.seconds: sources of {sorted(timed)}, missing {sorted(seconds.missing)}; expected each of"
            f" {', '.join(METRICS)} once"
        )
    for part, reason in seconds.missing.items():
        if not re.fullmatch(REASONS[part], reason):
            raise CertificationError(f"options.seconds: no seconds of {part} for {reason!r:.80}, which is no reason")
    return timed


def _check_contender(plan: Plan, contender: Contender, timed: Set[str]) -> None:
    found = {name: metric for name, metric in contender.metrics.items() if name.endswith("_s")}
    expected = _names(plan, timed, coherent=contender.dispatch_model == "coherent")
    if found.keys() != expected:
        raise CertificationError(f"{contender.label}: seconds {sorted(found)}; what times it gives {sorted(expected)}")
    for name, metric in found.items():
        numbers = [number for number in (metric.low, metric.value, metric.high) if number is not None]
        upside_down = metric.low is not None and metric.high is not None and metric.low > metric.high
        if min(numbers) < 0 or upside_down:
            raise CertificationError(
                f"{contender.label}: {name} {metric.value} from {metric.low} to {metric.high}; expected a rising"
                " interval of seconds of at least 0"
            )


def _names(plan: Plan, timed: Set[str], *, coherent: bool) -> set[str]:
    """The metrics of seconds: of the parts, of each link class where there are two, of passes, and of the step."""
    parts = timed if coherent else timed - {"kv"}
    names = {name for part in parts for name in METRICS[part]}
    if plan.cluster.num_nodes > 1 and plan.cluster.devices_per_node > 1:
        crossing = [name.removesuffix("_s") for part in parts & {"dispatch", "kv"} for name in METRICS[part]]
        names |= {f"{name}_{link}_s" for name in crossing for link in ("intra", "inter")}
    pipeline = plan.decisions.pipeline
    if pipeline is not None and plan.judges_pipeline:
        names |= {"moe_s"} if pipeline.backward is None else {"moe_s", "moe_backward_s"}
    if plan.decisions.sample_policy is not None and "dispatch" in timed:
        names |= {"exchange_s"}
    whole = {"dispatch", "experts"} | ({"kv"} if coherent else set())
    return names | ({"step_s"} if whole <= parts else set())
