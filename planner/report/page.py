"""Page of a plan (`moeplan report`): its document with pictures of what its certification recounted; and its card."""

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
from ..figures import contender_of, figure_of, named
from ..picture import Axis, Line, Plot
from ..replay.report import replayed_sections
from .answer import answer, headline
from .card import card
from .next_step import after_solve, per_engine
from .pictures import load_section, time_section
from .plan import about, plan_sections, strategies_of
from .traffic import traffic_section
from .trust import trust_section

# The balance of devices as engines print it, by what it is of max/mean.
UNITS: dict[str, Callable[[float], float]] = {
    "max/mean (moeplan)": lambda b: b,
    "mean/max (vLLM)": lambda b: 1 / b,
    "(max-mean)/mean (TensorRT-LLM)": lambda b: b - 1,
    "max_vio (Megatron-LM)": lambda b: b - 1,
}


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
        large, typed = [Headline(words)] if (words := headline(plan)) else [], per_engine(plan, self.path)
        return [
            Section("", (*large, Text.of(answer(plan), *self.left_out))),
            *replayed_sections(plan, self.path),
            *(section for section in document if not section.verbose),
            *filter(None, pictures),
            trust_section(plan, self.path, self.recount.certificate, self.profile),
            *self._balance(),
            Section("What to type next", (Text.of(after_solve(plan, self.path)), Table.of_words(typed))),
            *(section for section in document if section.verbose),
        ]

    def write(self, path: Path) -> list[str]:
        """Write the page, or to `.svg` its card, and return the page's titles; errors as in `write_page`."""
        title = f"{self.plan.model.name} on {self.plan.cluster}"
        if path.suffix == ".svg":
            with atomic_path(path) as temporary:
                temporary.write_text(card(self.plan, title, self.shown, self.tallies), encoding="utf-8")
            return []
        sections = self.sections()
        write_page(path, title, about(self.plan), sections)
        return [section.title for section in sections if section.title]

    def _balance(self) -> Iterator[Section]:
        """The balance in the units of engines."""
        if self.shown is None:
            return
        part, today, ours = self.shown
        known = [one for one in (contender_of(part, ours), contender_of(part, today)) if BALANCE in one.metrics]
        columns = [Column("", [named(one, part, today) for one in known])]
        columns += [Column(unit, [f"{of(figure_of(one, BALANCE)):.3f}" for one in known]) for unit, of in UNITS.items()]
        text = "Of the load of devices, mean over layers and steps. Megatron-LM takes max_vio of experts."
        yield Section("Balance in every engine's unit", (Text.of(text), Table(columns)))


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
