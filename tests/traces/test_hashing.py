"""The hash of sample ids against plain integers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moeplan.traces.hashing import mixed

MASK = 2**64 - 1


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
def test_it_is_the_first_output_of_splitmix64_for_that_seed(ids: list[int]) -> None:
    expected = []
    for seed in ids:
        z = (seed + 0x9E3779B97F4A7C15) & MASK
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
        expected.append(z ^ z >> 31)
    assert mixed(np.array(ids, np.int64)).tolist() == expected
