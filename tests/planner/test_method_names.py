"""The names of methods: what the command line offers, a request takes, and strategies and policies know."""

from typing import get_args

from moeplan.planner import request
from moeplan.planner.cli.options import Method
from moeplan.planner.strategy import STRATEGIES
from moeplan.solvers.netmoe import METHODS


def test_the_command_line_and_a_request_offer_exactly_the_methods_of_the_strategies() -> None:
    known = {method for row in STRATEGIES.values() for method in row.methods}
    assert set(get_args(request.Method)) == known
    assert {word.value for word in Method} == known


def test_no_method_is_listed_twice() -> None:
    for names in (get_args(request.Method), *(row.methods for row in STRATEGIES.values())):
        assert len(names) == len(set(names))


def test_a_policy_re_homes_by_exactly_the_methods_of_its_strategy() -> None:
    assert set(METHODS) == set(STRATEGIES["netmoe"].methods)
