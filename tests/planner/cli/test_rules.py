"""Rules of flags: what goes only with others, and what excludes what."""

from collections.abc import Mapping

import pytest

from moeplan.errors import UsageError
from moeplan.planner.cli.rules import Rule, check_flags, exclusive

RULES = (
    exclusive("--a", "--b"),
    Rule(("--c", "--d"), "without", ("--a", "--b"), "{flag} {value} alone"),
    Rule(("--c",), "with", ("--b", "--e"), "{flag} with {other}"),
)


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ({"--a": "x", "--b": True}, "--a and --b do different things; give one of them"),
        ({"--a": "x", "--b": False, "--c": None, "--d": []}, ""),
        ({"--d": 0}, "--d 0 alone"),
        ({"--c": "x", "--d": 1, "--a": 0}, ""),
        ({"--c": "{x}", "--e": 1}, "--c {x} alone"),
        ({"--c": "x", "--b": 1, "--e": 1}, "--c with --b"),
        ({"--c": "x", "--a": 1, "--e": 1}, "--c with --e"),
    ],
)
def test_the_first_rule_that_is_broken_refuses_and_0_was_given(given: Mapping[str, object], refusal: str) -> None:
    if not refusal:
        check_flags(given, RULES)
        return
    with pytest.raises(UsageError) as refused:
        check_flags(given, RULES)
    assert str(refused.value) == refusal
