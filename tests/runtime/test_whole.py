"""State dicts of single ranks: loaded where they were saved, refused under another placement."""

from dataclasses import replace

import torch

from moeplan.errors import MismatchError
from moeplan.profilers.world import World, run_world
from moeplan.runtime import parallelize
from tests.runtime.rank_cases import Case

CASE = Case("standard", (4, 4), (2, 3), seed=1)
OTHER = replace(CASE, seed=2)


def reload(world: World, _payload: None) -> tuple[bool, str]:
    """Whether a rank's own state fills an empty model, and what it is told under another placement."""
    saved = parallelize(CASE.model(), CASE.plan()).model.state_dict()
    empty = parallelize(OTHER.model(), CASE.plan()).model
    empty.load_state_dict(saved)
    filled = all(torch.equal(empty.state_dict()[name], value) for name, value in saved.items())
    try:
        parallelize(CASE.model(), OTHER.plan()).model.load_state_dict(saved)
    except MismatchError as error:
        return filled, str(error)
    return filled, "accepted"


def test_the_state_of_one_rank_is_loaded_under_its_own_placement_only() -> None:
    by_rank = run_world(2, reload, None, timeout_s=60)
    assert by_rank is not None
    for rank, (filled, told) in enumerate(by_rank):
        saved, here = (", ".join(map(str, case.placement().held(0, rank))) for case in (CASE, OTHER))
        assert saved != here
        assert filled
        assert told.startswith(
            f"layers.0.moe.experts: the state is of experts {saved}, this rank holds {here}; load it under the plan"
        )
