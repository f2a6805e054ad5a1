"""LUFFY: every layer's combine delivers each sample to where attention and exchanges together take least.

With `--condense` it decides something else: rows that need not travel, since one that is near stands for them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, Literal

from ....errors import UsageError
from ....profilers.cluster import Cluster
from ...params import HOW, Params, flag, flags_of, option_of

HISTORY = (0.9, 0.3)  # cosines of the layer before above and below which the paper does not compute this layer's
MIGRATION = ("batches", "numbers", "room", "candidates")
CONDENSE = "Rows that may add this error are condensed; RESULTS CHANGE. paper: from this cosine on."


def _history(text: str) -> tuple[float, float]:
    try:
        s1, s2 = map(float, text.split(":"))
    except ValueError:
        raise UsageError(f"--condense-history {text:.40}; expected S1:S2, such as 0.9:0.3") from None
    if not (-1 <= s2 < s1 <= 1):
        raise UsageError(f"--condense-history {text:.40}; expected cosines with S1 above S2")
    return s1, s2


def _schedule(text: str) -> float | Literal["paper"]:
    if text == "paper":
        return "paper"
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise UsageError(f"--condense-schedule {text:.40}; expected a share of the rows from 0 to below 1, or paper")
    return share


@dataclass(frozen=True, kw_only=True)
class LuffyParams(Params):
    """Parameters of luffy."""

    methods: ClassVar[Mapping[str, str]] = {
        "joint": "Least attention plus exchange",
        "paper": "LUFFY's Algorithm 1, with minimum growth",
    }

    method: Literal["joint", "paper"] = flag("joint", HOW)
    batches: Literal["packed", "padded"] = flag(
        "packed", "How attention batches a device's samples.", name="attention-batches"
    )
    numbers: Literal["equal", "free"] = flag("equal", "Samples per device; free ones weigh losses.")
    room: float | None = flag(
        None,
        "Most tokens of a device over the mean, padding included.",
        metavar="X",
        at_least=1,
        at_most=1e6,
        expected="1 to 1,000,000",
    )
    candidates: int | None = flag(
        None, "paper: devices a sample may go to; half of them.", metavar="Q", at_least=1, expected="at least 1"
    )
    condense: float | None = flag(None, CONDENSE, metavar="TAU", at_most=1e6, expected="at most 1,000,000")
    condense_loss: float | None = flag(
        None,
        "Condense, as far as --model loses so many bits per token.",
        metavar="BITS",
        above=0,
        at_most=1e3,
        expected="above 0 bits",
    )
    condense_error: float | None = flag(
        None,
        "Condense, as far as outputs of MoE layers err by this share.",
        metavar="SHARE",
        at_least=0,
        at_most=1 - 1e-9,
        expected="a share from 0 to below 1",
    )
    condense_schedule: float | Literal["paper"] | None = flag(
        None, "In training: hold this share of rows, or the paper's Eq. 2.", metavar="SHARE|paper", parse=_schedule
    )
    condense_history: tuple[float, float] = flag(
        HISTORY, "paper: cosines of its history rule.", metavar="S1:S2", parse=_history
    )
    medoid: bool = flag(False, "A kept row travels as it is, not the mean.")
    model: str | None = flag(None, "embedded, or a directory, to tell the loss by.", metavar="MODEL")
    text: Path | None = flag(None, "What the trace was recorded on, for --model.")  # noqa: RUF009  as the others

    def check(self, cluster: Cluster) -> None:
        """Refuse flags that do not go together."""
        flags, usual = dict(flags_of(type(self))), {one.name: one.default for one in fields(self)}
        given = {name: option_of(name, one) for name, one in flags.items() if getattr(self, name) != usual[name]}
        how = [given[name] for name in ("condense", "condense_loss", "condense_error") if name in given]
        if len(how) > 1:
            raise UsageError(f"{' and '.join(how)} each say how far to condense; give one of them")
        others = [option for name, option in given.items() if name != "method" and (name in MIGRATION) == bool(how)]
        if others:
            if how:
                raise UsageError(f"{others[0]} with {how[0]}, which moves no samples; leave one of them out")
            raise UsageError(f"{others[0]} where samples move; give --condense TAU beside it, or leave it out")
        if self.condense is not None and not (
            -1 <= self.condense <= 1 if self.method == "paper" else self.condense >= 0
        ):
            expected = "a cosine from -1 to 1" if self.method == "paper" else "an error of at least 0"
            raise UsageError(f"--condense {self.condense:g} by --method {self.method}; expected {expected}")
        starts = 1.0 if self.method == "paper" else 0.0
        if isinstance(self.condense_schedule, float) and self.condense == starts:
            raise UsageError(f"--condense {self.condense:g} condenses nothing for a share to start from; give another")
        if self.condense_schedule == "paper" and (self.method != "paper" or self.condense is None):
            raise UsageError("--condense-schedule paper moves a cosine; expected --method paper and --condense COSINE")
        if (self.model is None) != (self.text is None):
            raise UsageError("--model and --text tell the loss together; give both")
        if how and self.condense is None and self.model is None:
            raise UsageError(f"{how[0]} without a model, which tells it: give --model and --text, or --condense TAU")

    @property
    def decides(self) -> str:
        """The decision that is asked for."""
        asked = (self.condense, self.condense_loss, self.condense_error)
        return "sample_policy" if asked == (None, None, None) else "condensation"
