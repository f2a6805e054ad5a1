import pytest

from moeplan.solvers.pipemoe import nested_pairs


@pytest.mark.parametrize("most", [1, 2, 7, 12])
def test_pairs_are_those_of_which_one_divides_the_other_fewest_pieces_first(most: int) -> None:
    found = [(there, back) for there, back in nested_pairs(most).tolist()]
    expected = {(f, b) for f in range(1, most + 1) for b in range(1, most + 1) if not (f % b and b % f)}
    assert len(found) == len(expected)
    assert {*found} == expected
    assert found == sorted(found, key=lambda pair: (max(pair), sum(pair)))
    assert found[0] == (1, 1)
