"""The memory of the layer beside that of the plain one: the most bytes of tensors alive at once."""

import numpy as np
import torch

from tests.runtime.engine.alive import Alive
from tests.runtime.engine.engine_cases import HIDDEN, NUM_TOKENS, found_by_four


def test_the_tracker_sees_what_is_alive_at_once() -> None:
    with Alive() as alive:
        a = torch.zeros(1000)
        b = a + 1
        del a
        b = b * 2
    assert alive.most == 2 * 4000
    assert alive.now == 4000
    assert len(b) == 1000


def test_buffers_stay_within_one_and_a_half_of_the_plain_all_to_alls() -> None:
    plain, *ours = np.moveaxis(np.array([found.peaks for found in found_by_four()]), -1, 0)
    assert plain.min() > NUM_TOKENS * HIDDEN * 4
    assert (np.array(ours) <= 1.5 * plain).all()
