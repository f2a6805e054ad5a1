"""The setting of a comparison: what plans are replayed on, and what times them."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import UsageError
from ...profilers.cluster import Cluster
from ...solvers.replicas import ReplayRule
from ...traces.count_form import CountTrace, of_tokens
from ...traces.model import ModelSpec
from ...traces.reader import Trace
from ..measures.speeds import Speeds
from ..request import Phase
from .entry import Entry
from .judges import Judges

__all__ = ["Setting", "check_setting"]

MOST_DEVICES = 512  # of a matrix of all pairs


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """A trace, who of it judges, and the one cost model of a comparison.

    Parameters
    ----------
    model
        The trace's, sizes that it lacks as the plans know them.
    speeds
        None without a profile and without links.
    replica_rule
        Which replica a token uses, as an engine has it; None: as each plan has it.
    between
        Whether copies are to be told of every pair of devices.
    """

    source: Trace | CountTrace
    judges: Judges
    cluster: Cluster
    model: ModelSpec
    speeds: Speeds | None
    phases: Sequence[Phase]
    samples_per_step: int
    replica_rule: ReplayRule | None = None
    between: bool = False

    @property
    def trace(self) -> Trace:
        """The trace of tokens; refused in count form."""
        return of_tokens(self.source)

    @property
    def by_loads(self) -> bool:
        """Whether only the loads of experts are known, by which placements are then judged."""
        return isinstance(self.source, CountTrace)


def check_setting(setting: Setting, entries: Sequence[Entry]) -> None:
    """Refuse what the trace, or one of the plans, has no answer to."""
    path, rule = setting.source.path, setting.replica_rule
    if setting.between and setting.by_loads:
        raise UsageError(f"{path}: counts do not say between which devices copies go; leave -o out")
    if setting.between and setting.cluster.num_devices > MOST_DEVICES:
        raise UsageError(f"-o of {setting.cluster.num_devices:,} devices; a matrix is drawn of {MOST_DEVICES} at most")
    if rule is not None and (moving := [entry.path for entry in entries if entry.policy]):
        raise UsageError(f"--replica-rule with {moving[0]}, which moves samples and has its own; leave it out")
    if rule not in (None, "even") and setting.by_loads:
        raise UsageError(
            f"--replica-rule {rule} goes by where tokens come from, and {path} holds counts alone; expected even, or a"
            " trace of tokens"
        )
