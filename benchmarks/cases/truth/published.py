"""The figures of `benchmarks/truth.yaml`: what others measured, where they say so, and what a prediction is given."""

import inspect
import json
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from moeplan.files import read_yaml, validated

from .predictors import PREDICTORS

PATH = Path(__file__).parents[2] / "truth.yaml"
MAX_BYTES = 2**20
Text = Annotated[str, Field(min_length=3)]
Address = Annotated[str, Field(pattern=r"^https://\S+$")]


class _Checked(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Figure(_Checked):
    """A published figure, and how it is predicted."""

    what: Text
    measured: float
    unit: Literal["x", "share", "s", "MiB", "load"]
    #: Of a change: what it would be without, where better and worse part; a number, or the figure that says it
    neutral: float | str | None = None
    forced: bool = False  #: Of a change: whether no prediction could have told it wrong
    arithmetic: bool = False  #: Whether the set-up alone gives it: no evidence
    by: str = ""  #: The predictor; empty: the source's
    given: dict[str, Any] = {}  #: What it is given beside, or in place of, what the source says
    over: dict[str, Any] = {}  #: What differs in the prediction that this one is divided by; empty: it is not
    why: str = ""  #: The cause of a miss, where one was found


class Source(_Checked):
    """A paper, page or thread with its figures, which share set-up and assumptions."""

    name: Text
    url: Address
    where: Text
    date: Annotated[str, Field(pattern=r"^20\d\d-\d\d(-\d\d)?$")]
    read: Literal["in full", "in part", "second-hand"]
    setup: Text
    assumes: Text
    by: str = ""
    given: dict[str, Any] = {}
    figures: Annotated[list[Figure], Field(min_length=1)]

    def calls(self, figure: Figure, models: dict[str, dict[str, int]]) -> tuple[str, list[dict[str, Any]]]:
        """The predictor of a figure, and what each of its calls is given: one, or dividend and divisor."""
        given = {**self.given, **figure.given}
        calls = [given, {**given, **figure.over}] if figure.over else [given]
        return figure.by or self.by, [
            {**one, "model": models.get(one["model"])} if "model" in one else one for one in calls
        ]


class Left(_Checked):
    """A published figure that is not predicted, and why."""

    what: Text
    url: Address
    why: Text


class Published(_Checked):
    """All of the file."""

    exceptions: list[Text]  #: From the rules that the file begins with
    models: dict[str, dict[str, int]]  #: Sizes by the name that `given` refers to
    sources: list[Source]
    not_predicted: list[Left]

    @model_validator(mode="after")
    def _can_be_predicted(self) -> "Published":
        for source in self.sources:
            for figure in source.figures:
                name, others = f"{source.name}, {figure.what}", [one.what for one in source.figures]
                if isinstance(figure.neutral, str) and figure.neutral not in others:
                    raise ValueError(f"{name}: neutral {figure.neutral!r}; expected a figure of its source")
                self._check(name, figure, *source.calls(figure, self.models))
        return self

    @staticmethod
    def _check(name: str, figure: Figure, by: str, calls: list[dict[str, Any]]) -> None:
        if figure.forced and figure.neutral is None:
            raise ValueError(f"{name}: forced, and no change; expected neutral beside it")
        if not figure.measured:
            raise ValueError(f"{name}: measured 0; expected a figure of which an error can be a share")
        if by not in PREDICTORS:
            raise ValueError(f"{name}: by {by or 'nothing'}; expected one of {', '.join(PREDICTORS)}")
        for given in calls:
            if given.get("model", {}) is None:
                raise ValueError(f"{name}: a model that is not one of models; expected its name there")
            try:
                inspect.signature(PREDICTORS[by]).bind(**given)
            except TypeError as error:
                raise ValueError(f"{name}: {by} {error}") from None

    def predicted(self, source: Source, figure: Figure) -> float:
        """The prediction of moeplan."""
        by, calls = source.calls(figure, self.models)
        dividend, *divisor = (_predicted(by, json.dumps(given)) for given in calls)
        return dividend / divisor[0] if divisor else dividend


@cache
def _predicted(by: str, given: str) -> float:
    """A prediction, once for figures that are given the same."""
    return PREDICTORS[by](**json.loads(given))


@cache
def published(path: Path = PATH) -> Published:
    """What the file holds; InputError, in one line, where a field is missing, unknown or of another type."""
    what = "published figures"
    return validated(Published, read_yaml(path, what=what, max_bytes=MAX_BYTES), source=str(path), what=what)
