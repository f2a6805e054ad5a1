"""The attention law of a task."""

from ....errors import UsageError
from ....solvers.luffy import Law, law_of
from ...task import Task
from . import LuffyParams


def law_for(task: Task) -> Law:
    """The law of attention nearest to the profile's at the lengths of the fitted samples.

    UsageError where attention, or an exchange, is not timed: then this is NetMoE.
    """
    params, costs, samples = LuffyParams.of(task.params), task.scene.costs, task.scene.samples
    assert samples is not None
    curve = None if costs is None else costs.attention_of("migrating")
    if costs is None or curve is None or costs.exchange is None or not task.request.cluster.links:
        missing = {"attention": "there is no profile"} if costs is None else costs.missing
        unlinked = "no links are known; give --link intra=GBps:us, and inter=GBps:us between nodes"
        why = missing.get("attention") or missing.get("dispatch", unlinked)
        why += "; give --profile with both (moeplan profile, or --preset)" * (task.request.profile is None)
        raise UsageError(
            f"--strategy luffy weighs attention against exchanges, but {why}; or --strategy netmoe, which weighs"
            " exchanges alone"
        )
    try:
        return law_of(
            curve,
            samples.index.unit_tokens[task.fitted],
            batches=params.batches,
            numbers="free" if params.method == "paper" else params.numbers,
            room=params.room,
            candidates=params.candidates,
        )
    except ValueError as error:
        raise UsageError(
            f"--profile {task.request.profile}: {error}; measure attention again: moeplan profile"
        ) from error
