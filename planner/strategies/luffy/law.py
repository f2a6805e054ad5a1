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
    links = task.request.cluster.links
    if costs is None or costs.attention is None or costs.exchange is None or not links:
        why = "no profile and no links" if costs is None else costs.missing.get("attention", "no links are known")
        raise UsageError(
            f"--strategy luffy weighs attention against exchanges, and has not both timed ({why}); give a --profile"
            " with attention and links (moeplan profile, or --preset), or --strategy netmoe, which weighs exchanges"
        )
    return law_of(
        costs.attention,
        samples.index.unit_tokens[task.fitted],
        batches=params.batches,
        numbers="free" if params.method == "paper" else params.numbers,
        room=params.room,
        candidates=params.candidates,
    )
