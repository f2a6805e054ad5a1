"""What a plan's figures rest on: its samples, the errors of its profile, its certificate, command and hashes."""

from collections.abc import Mapping
from pathlib import Path

from ...profilers.profile import Profile
from ...runtime.plan import Part, Plan
from ..certify import Certificate
from ..document import Section, Table
from ..evaluate.costs import ENCODING
from ..figures import link_text, percent
from ..options import EvaluationOptions, SecondsOptions
from .command import made_by
from .plan import members


def trust_section(plan: Plan, path: Path, certificate: Certificate, profile: Profile | None) -> Section:
    """The box of a plan's page."""
    rows = dict[str, str]()
    if plan.evaluation is not None:
        fit, held_out, unit = plan.evaluation.fit, plan.evaluation.held_out, EvaluationOptions.of(plan).unit
        rows["fitted on"] = _size(fit, unit)
        rows["judged on"] = "the same" if held_out is None else f"unseen: {_size(held_out, unit)}"
    rows |= {f"{parts} timed by": words for parts, words in _errors(plan, profile).items()}
    rows["certificate"] = certificate.summary(path)
    for line in certificate.details():
        word, _, what = line.partition(" ")
        rows[word] = what.strip()
    rows["made by"] = made_by(plan, profile)
    rows["with"] = f"moeplan {plan.moeplan_version}, {plan.created_at:%Y-%m-%d}, seed {plan.seed}"
    files = {"plan": plan.plan_sha256, "trace": plan.inputs.trace, "profile": plan.inputs.profile}
    files |= {"plan that it stands on": plan.inputs.base}
    rows |= {
        f"SHA-256, {name}": one if isinstance(one, str) else f"{one.sha256}  {one.path}"
        for name, one in files.items()
        if one is not None
    }
    return Section("What it rests on", (Table.of_words(rows),))


def _size(part: Part, unit: str) -> str:
    return f"{part.num_tokens:,} tokens, {unit}s: {members(part, unit)}"


def _errors(plan: Plan, profile: Profile | None) -> Mapping[str, str]:
    """Error of what times each part, on sizes that the profile's fit had not seen; parts with one source together."""
    if profile is None or plan.evaluation is None or SecondsOptions.key not in plan.options:
        return {}
    timed = {name for contender in plan.evaluation.judging.contenders for name in contender.metrics}
    parts, errors = dict[str, list[str]](), dict[str, str]()
    for part, source in SecondsOptions.of(plan).sources.items():
        if f"{part.split()[0]}_s" in timed or part == ENCODING:
            parts.setdefault(source, []).append(part)
    links = {f"link {kind}": f"link {kind}: {link_text(link)}" for kind, link in plan.cluster.links.items()}
    for source, names in parts.items():
        series = profile.series.get(source)
        fit = None if series is None else series.fit
        held_out = None if fit is None else fit.held_out.get(fit.model.kind)
        words = links.get(source, source) if held_out is None else (
            f"{source}: median {percent(held_out.median_error, 1)}, 95th percentile {percent(held_out.p95_error, 1)},"
            f" on {held_out.num_sizes:,} sizes held out"
        )  # fmt: skip
        errors[", ".join(names)] = words
    return errors
