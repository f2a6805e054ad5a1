"""Sample policies on a trace that they were not made from: its samples are counted, moved online by the plan's own
predictor, and judged beside the same samples that stay.

Legend: I samples of the roll.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...errors import UsageError
from ...runtime.migrating.predictor import Predictor, predictor_of
from ...solvers.netmoe import METHODS
from ..evaluate import Replayed
from ..netmoe.counted import Counted, count_samples
from ..netmoe.run import Run
from .entry import Entry
from .setting import Setting

__all__ = ["moved"]


def moved(entries: Sequence[Entry], setting: Setting) -> list[Replayed]:
    """Every policy, and its baseline: the same experts, samples where they start.

    Raises
    ------
    UsageError
        A method that is not known or leaves layers out, or replicas whose use depends on where samples are.
    InputError
        A predictor that is missing, damaged, or not the plan's.
    """
    called = setting.judges.called
    assert called is not None
    predictors = [_predictor(entry) for entry in entries]
    nobody_I = np.zeros(len(called.roll.sample), np.bool_)
    placements = {entry.path: entry.placement for entry in entries}
    phases = setting.phases or None
    counted = count_samples(setting.source, called.roll, nobody_I, placements, setting.cluster, phases=phases)
    row = []
    for entry, predictor in zip(entries, predictors, strict=True):
        run = _run(entry, setting, counted, predictor)
        found, _ = run.contender("plan", "migrating", called.place, bounded=False)
        base, _ = run.contender("base", "standard", called.place, bounded=False)
        row += [replace(found, name=entry.path), replace(base, name=entry.baselines[0].name)]
    return row


def _run(entry: Entry, setting: Setting, counted: Counted, predictor: Predictor | None) -> Run:
    """A plan's policy among the samples that judge."""
    assert setting.judges.called is not None
    assert entry.policy is not None
    return Run(
        method=entry.policy.method,
        cluster=setting.cluster,
        model=setting.model,
        samples_per_step=setting.samples_per_step,
        roll=setting.judges.called.roll,
        counted=Counted(counted.experts, {"plan": counted.traffic[entry.path]}),
        parts=[setting.judges.called.place],
        predictors={} if predictor is None else {"plan": predictor},
        speeds=setting.speeds,
        has_base=False,
    )


def _predictor(entry: Entry) -> Predictor | None:
    """What lies beside the plan; None where its policy looks at no next layer."""
    policy, model = entry.policy, entry.plan.model
    assert policy is not None
    if policy.method not in METHODS or policy.layers != tuple(range(model.num_layers)):
        raise UsageError(
            f"{entry.path}: a policy by {policy.method!r:.20} in {len(policy.layers)} of {model.num_layers} layers;"
            f" expected {' or '.join(METHODS)} in all of them"
        )
    return predictor_of(entry.plan, Path(entry.path).parent)
