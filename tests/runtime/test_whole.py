"""State dicts of single ranks: loaded where they were saved, refused under another placement."""

from dataclasses import replace

import torch

from moeplan.errors import MismatchError
from moeplan.profilers.world import World, run_world
from moeplan.runtime import parallelize
from tests.runtime.rank_cases import Case

CASE = Case("standard", (4, 4), (2, 3), seed=1)
OTHER = replace(CASE, seed=2)
ON_ONE = replace(CASE, slots=(0, 8))


def reload(_world: World, _payload: None) -> tuple[bool, bool, str]:
    """Whether a rank's own state fills an empty model, with experts and without, and what it is told elsewhere."""
    saved = parallelize(CASE.model(), CASE.plan()).model.state_dict()
    try:
        parallelize(CASE.model(), OTHER.plan()).model.load_state_dict(saved)
    except MismatchError as error:
        return fills(CASE), fills(ON_ONE), str(error)
    return fills(CASE), fills(ON_ONE), "accepted"


def fills(case: Case) -> bool:
    """Whether a state goes into a model of other weights."""
    saved = parallelize(case.model(), case.plan()).model.state_dict()
    model = parallelize(OTHER.model(), case.plan()).model
    model.load_state_dict(saved)
    return all(torch.equal(model.state_dict()[name], value) for name, value in saved.items())


def test_the_state_of_one_rank_is_loaded_under_its_own_placement_only() -> None:
    by_rank = run_world(2, reload, None, timeout_s=60)
    assert by_rank is not None
    for rank, (filled, filled_on_one, told) in enumerate(by_rank):
        saved, here = (", ".join(map(str, case.placement().held(0, rank))) for case in (CASE, OTHER))
        assert saved != here
        assert filled
        assert filled_on_one
        assert told.startswith(
            f"layers.0.moe.experts: the state is of experts {saved}, this rank holds {here}; it was saved by"
        )
