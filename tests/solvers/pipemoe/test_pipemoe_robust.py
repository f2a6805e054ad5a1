import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.solvers.outcome import Status
from moeplan.solvers.pipemoe import measured_degrees, optimal_degree, robust_choice
from moeplan.solvers.pipemoe.seconds import layer_seconds

tables = st.integers(1, 5).flatmap(
    lambda degrees: st.lists(st.lists(st.floats(0, 10), min_size=degrees, max_size=degrees), min_size=1, max_size=9)
)


@settings(max_examples=80, deadline=None)
@given(tables)
def test_the_degree_has_the_smallest_largest_regret_of_a_walk_over_scenarios(table: list[list[float]]) -> None:
    found = robust_choice(table)
    regrets = [max(row[r] - min(row) for row in table) for r in range(len(table[0]))]
    assert found.regret_s.tolist() == regrets
    assert found.choice == regrets.index(min(regrets))
    assert found.outcome.objective.value == min(regrets)
    assert found.outcome.status is Status.OPTIMAL


def test_lines_at_the_ends_of_their_errors_are_scenarios() -> None:
    layer: dict[str, Any] = {"a_a": 3e-4, "b_a": 3e-10, "a_e": 1.2e-4, "b_e": 3.3e-13}
    ends = [
        {name: value * factor for name, value, factor in zip(layer, layer.values(), factors, strict=True)}
        for factors in itertools.product((0.5, 2.0), repeat=4)
    ]
    degrees = np.arange(1, 33)

    def seconds(a_a: float, b_a: float, a_e: float, b_e: float) -> Any:
        t_d, t_e = a_a + b_a * 1e8 / degrees, a_e + b_e * 1e11 / degrees
        return layer_seconds(degrees, t_d, t_e, t_d) + layer_seconds(degrees, t_d, 2 * t_e, t_d)

    found = robust_choice([seconds(**end) for end in ends])
    plain = optimal_degree(**layer, n_d=1e8, n_e=1e11)
    assert found.outcome.objective.value < found.regret_s[plain.joint - 1]


def test_errors_of_a_curve_of_any_form_move_the_degree_from_the_best_to_a_safer_one() -> None:
    def dispatch(level: float) -> Any:
        return lambda n: 0.02 * level + n + 0.1 * np.sqrt(n)

    degrees = np.arange(1, 65)
    rows = []
    for level in (0.1, 1.0, 10.0):
        t_d, t_e = dispatch(level)(1 / degrees), 0.02 + 1.5 / degrees
        rows.append(layer_seconds(degrees, t_d, t_e, t_d))
    best = measured_degrees(dispatch(1.0), lambda n: 0.02 + 1.5 * n, n_d=1, n_e=1, backward=0)
    found = robust_choice(rows)
    assert best.forward.tolist() == [int(rows[1].argmin()) + 1]
    assert found.outcome.objective.value < found.regret_s[best.forward[0] - 1]


@pytest.mark.parametrize("wrong", [[], [[]], [1.0, 2.0], [[-1.0]], [[np.nan]], [[np.inf, 1.0]]])
def test_tables_that_are_no_tables_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        robust_choice(wrong)
