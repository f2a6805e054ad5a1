"""Page of a plan (`moeplan report`): its document with pictures of what its certification recounted; and its card."""

import html
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...files import atomic_path
from ...profilers.profile import Profile
from ...runtime.plan import Part, Plan
from ..certify import Recount
from ..certify.certificate import gone
from ..document import Column, Headline, Section, Table, Text, write_page
from ..evaluate.metrics import BALANCE, METRICS
from ..evaluate.tally import Tally
from ..figures import contender_of, named, percent
from ..options import EvaluationOptions, SecondsOptions
from ..picture import LIGHT, PICTURE_STYLE, Axis, Line, Picture, Plot, colour_rules
from ..replay.report import replayed_sections
from .answer import answer, headline
from .command import made_by
from .next_step import after_solve, per_engine
from .pictures import histogram, load_section, strips, time_section, traffic_section
from .plan import about, plan_sections, strategies_of

# The balance of devices as engines print it, by what it is of max/mean.
UNITS: dict[str, Callable[[float], float]] = {
    "max/mean (moeplan)": lambda b: b,
    "mean/max (vLLM)": lambda b: 1 / b,
    "(max-mean)/mean (TensorRT-LLM)": lambda b: b - 1,
    "max_vio (Megatron-LM)": lambda b: b - 1,
}
CARD = (1200, 630)


@dataclass(frozen=True, slots=True)
class PlanPage:
    """What a plan's page is made of."""

    plan: Plan
    path: Path
    recount: Recount
    profile: Profile | None

    @property
    def shown(self) -> tuple[Part, str, str] | None:
        """The part that judges, and the labels of today and of the plan; None of a plan that was not judged."""
        if self.plan.evaluation is None or self.plan.verdict is None:
            return None
        part = self.plan.evaluation.judging
        return part, self.plan.verdict.against, part.contenders[0].label

    @property
    def tallies(self) -> Mapping[str, Tally]:
        """Tallies of the contenders; none without the trace, or where figures are means over several."""
        task, evaluated = self.recount.task, self.recount.evaluated
        return {} if task is None or evaluated is None or task.request.mixture else evaluated.tallies

    @property
    def left_out(self) -> list[str]:
        """What the page lacks that a plan of its kind could have, and how to get it back, in a line."""
        plan, certificate, parts = self.plan, self.recount.certificate, list[str]()
        if not certificate.replayed:
            parts.append(f"loads of devices, bytes between them: {certificate.lacking(plan)}")
        elif not self.tallies:
            parts.append("loads of devices, bytes between them: figures are means over several traces")
        if certificate.profile is None and plan.inputs.profile is not None:
            parts.append(f"errors of the profile: {gone('profile', plan.inputs.profile)}")
        return [f"left out: {'; '.join(parts)}"] if parts else []

    def sections(self) -> list[Section]:
        """The page's sections; those that a plan has nothing for are not there."""
        plan, tallies = self.plan, self.tallies
        _, *document = plan_sections(plan)
        pictures = list[Section | None]()
        if self.shown is not None:
            part, today, ours = self.shown
            pictures.append(time_section(part, today, whole=plan.decisions.pipeline is None))
            if tallies:
                pictures.insert(0, load_section(part, tallies, today, [ours]))
            pictures.append(_sizes(plan))
        for strategy in strategies_of(plan):
            pictures += strategy.pictures(plan, self.path.parent, self.recount.task)
        if self.shown is not None and tallies:
            pictures.append(traffic_section(part, tallies, [today, ours], today, plan.cluster))
        large = [Headline(words)] if (words := headline(plan)) else []
        return [
            Section("", (*large, Text.of(answer(plan), *self.left_out))),
            *(section for section in document if not section.verbose),
            *filter(None, pictures),
            *replayed_sections(plan, self.path),
            *self._trust(),
            Section("What to type next", (Text.of(after_solve(plan, self.path)), _words(per_engine(plan, self.path)))),
            *(section for section in document if section.verbose),
        ]

    def write(self, path: Path) -> None:
        """Write the page, or to `.svg` its card; errors as in `write_page`."""
        title = f"{self.plan.model.name} on {self.plan.cluster}"
        if path.suffix == ".svg":
            with atomic_path(path) as temporary:
                temporary.write_text(self._card(title), encoding="utf-8")
        else:
            write_page(path, title, about(self.plan), self.sections())

    def _trust(self) -> Iterator[Section]:
        """What the figures rest on, and the balance in the units of engines."""
        plan, certificate, rows = self.plan, self.recount.certificate, dict[str, str]()
        if plan.evaluation is not None:
            fit, held_out = plan.evaluation.fit, plan.evaluation.held_out
            unit = EvaluationOptions.of(plan).unit
            rows["fitted on"] = f"{fit.num_tokens:,} tokens of {fit.num_samples:,} {unit}(s)"
            rows["judged on"] = "the same"
            if held_out is not None:
                rows["judged on"] = f"{held_out.num_tokens:,} unseen tokens of {held_out.num_samples:,} {unit}(s)"
        rows |= {f"{parts} timed by": words for parts, words in _errors(plan, self.profile).items()}
        rows["certificate"] = certificate.summary(self.path)
        for line in certificate.details():
            word, _, what = line.partition(" ")
            rows[word] = what.strip()
        rows["made by"] = made_by(plan, self.profile)
        rows["with"] = f"moeplan {plan.moeplan_version}, {plan.created_at:%Y-%m-%d}, seed {plan.seed}"
        files = {"plan": plan.plan_sha256, "trace": plan.inputs.trace, "profile": plan.inputs.profile}
        files |= {"plan that it stands on": plan.inputs.base}
        rows |= {
            f"SHA-256, {name}": one if isinstance(one, str) else f"{one.sha256}  {one.path}"
            for name, one in files.items()
            if one is not None
        }
        yield Section("What it rests on", (_words(rows),))
        if self.shown is not None:
            part, today, ours = self.shown
            known = [one for one in (contender_of(part, ours), contender_of(part, today)) if BALANCE in one.metrics]
            columns = [Column("", [named(one, part, today) for one in known])]
            columns += [
                Column(unit, [f"{of(one.metrics[BALANCE].value):.3f}" for one in known]) for unit, of in UNITS.items()
            ]
            text = "Of the load of devices, mean over layers and steps. Megatron-LM takes max_vio of experts."
            yield Section("Balance in every engine's unit", (Text.of(text), Table(columns)))

    def _card(self, title: str) -> str:
        """The answer and the loads as an SVG of the size that links are shown with."""
        width, height = CARD
        lines = textwrap.wrap(answer(self.plan), 54)[:7]
        words = headline(self.plan)
        content = _large(40, 62, title, 24, "s")
        content += _large(40, 140, words, min(52, 940 // max(len(words), 1)), "t", bold=True)
        content += "".join(_large(40, 182 + 26 * at, line, 19, "t") for at, line in enumerate(lines))
        if self.shown is not None and (tallies := self.tallies):
            part, today, ours = self.shown
            content += _nested(histogram(part, tallies, today, [ours], height=130), 640, 30, 520)
            for at, strip in enumerate(strips(part, tallies, today, [ours], height=100)):
                content += _nested(strip, 40 + 600 * at, 356, 520)
        content += _large(40, height - 12, f"moeplan report, plan {self.plan.plan_sha256[:12]}", 14, "s")
        size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        style = f"<style>{PICTURE_STYLE}{colour_rules(LIGHT)}</style>"
        paper = f'<rect class="p" width="{width}" height="{height}"/>'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{style}{paper}{content}</svg>\n'


def _sizes(plan: Plan) -> Section | None:
    """The gain at every size of a step that was judged."""
    assert plan.verdict is not None
    sizes = plan.verdict.sizes
    if len(sizes) < 2:
        return None
    tokens, gains = [one.tokens_per_step for one in sizes], [one.share for one in sizes]
    values = [-100 * gain.value for gain in gains]
    low, high = (
        [value if end is None else -100 * end for value, end in zip(values, ends, strict=True)]
        for ends in ([gain.high for gain in gains], [gain.low for gain in gains])
    )
    lines = [Line(tokens, values), Line(tokens, values, shape="dots", low=low, high=high)]
    picture = Plot(
        "",
        lines,
        Axis("tokens per step", log=True),
        Axis(f"{METRICS[plan.verdict.metric].noun}: change from today, % (95 %)", zero=True),
    )
    return Section("From which step on it pays", (picture,))


def _errors(plan: Plan, profile: Profile | None) -> dict[str, str]:
    """Error of what times each part, on sizes that the profile's fit had not seen; parts with one source together."""
    if profile is None or plan.evaluation is None or SecondsOptions.key not in plan.options:
        return {}
    timed = {name for contender in plan.evaluation.judging.contenders for name in contender.metrics}
    parts, errors = dict[str, list[str]](), dict[str, str]()
    for part, source in SecondsOptions.of(plan).sources.items():
        if f"{part.split()[0]}_s" in timed:
            parts.setdefault(source, []).append(part)
    for source, names in parts.items():
        series = profile.series.get(source)
        fit = None if series is None else series.fit
        held_out = None if fit is None else fit.held_out.get(fit.model.kind)
        words = source if held_out is None else (
            f"{source}: median {percent(held_out.median_error, 1)}, 95th percentile {percent(held_out.p95_error, 1)},"
            f" on {held_out.num_sizes:,} sizes held out"
        )  # fmt: skip
        errors[", ".join(names)] = words
    return errors


def _words(rows: Mapping[str, str]) -> Table:
    """A table of two columns of words."""
    return Table([Column("", [*rows]), Column("", [*rows.values()])], words=True)


def _large(x: float, y: float, words: str, size: int, kind: str, *, bold: bool = False) -> str:
    style = f"font-size:{size}px{';font-weight:700' * bold}"
    return f'<text class="{kind}" x="{x}" y="{y}" style="{style}">{html.escape(words)}</text>'


def _nested(picture: Picture, x: float, y: float, width: float) -> str:
    """A picture inside another, so wide."""
    content, height = picture.content()
    box = f'viewBox="0 0 {picture.width} {height:.0f}"'
    return f'<svg x="{x}" y="{y}" width="{width}" height="{width * height / picture.width:.0f}" {box}>{content}</svg>'
