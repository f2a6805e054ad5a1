"""Rules of the flags of a command: which go only with others, and which exclude each other."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from ...errors import UsageError


class Rule(NamedTuple):
    """Flags that are refused together with any of some others, or where none of the others is given."""

    flags: tuple[str, ...]
    refused: Literal["with", "without"]
    others: tuple[str, ...]
    sentence: str  #: The refusal; `{flag}`, its `{value}` and, of rules "with", `{other}` are filled in


def exclusive(*flags: str) -> Rule:
    """Rule that only one of some flags may be given."""
    return Rule(flags, "with", flags, "{flag} and {other} do different things; give one of them")


def check_flags(given: Mapping[str, object], rules: Sequence[Rule]) -> None:
    """Refuse flags by the first rule that they break; UsageError.

    Parameters
    ----------
    given
        Every flag's value by its name; None, False and empty lists were not given.
    """
    values = {name: value for name, value in given.items() if value is not None and value is not False and value != []}
    for rule in rules:
        for flag in (name for name in rule.flags if name in values):
            beside = [name for name in rule.others if name in values and name != flag]
            if bool(beside) == (rule.refused == "with"):
                raise UsageError(rule.sentence.format(flag=flag, value=values[flag], other="".join(beside[:1])))
