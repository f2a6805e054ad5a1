"""The exception tree of moeplan and the exit code of each class.

::

    MoeplanError            1   anything below
    |-- UsageError          2   the request itself cannot be met (flags, options, impossible clusters)
    |-- InputError          3   a file is missing, damaged, hostile or of the wrong kind
    |-- MismatchError       4   files or ranks that do not belong together (hash, world size, model)
    |-- CertificationError  5   a plan claims a figure that its trace does not give
    |-- RankError           6   a rank or a worker died, hung or disagreed
    |-- StorageError        7   writing failed: no space, no permission
    `-- NoBenefitError      8   a plan does not pay on the trace that judged it

Ctrl-C ends a command with 130. A message says what was found, what was expected and what to do; it stays one line that
steers no terminal, whatever the names and files that it quotes hold.
"""

from typing import ClassVar


def printable(text: str) -> str:
    """`text` with everything that does not print (line ends, terminal escapes, lone surrogates) as its escape."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


class MoeplanError(Exception):
    """An expected failure, told to the user as one line."""

    exit_code: ClassVar[int] = 1

    def __str__(self) -> str:
        return printable(super().__str__())


class UsageError(MoeplanError):
    """The request itself cannot be met."""

    exit_code = 2


class InputError(MoeplanError):
    """A file is missing, damaged, hostile or of the wrong kind."""

    exit_code = 3


class MismatchError(MoeplanError):
    """Files or ranks that do not belong together."""

    exit_code = 4


class CertificationError(MoeplanError):
    """A plan claims what its trace does not give."""

    exit_code = 5


class RankError(MoeplanError):
    """A rank or a worker died, hung or disagreed with the others."""

    exit_code = 6


class StorageError(MoeplanError):
    """A file could not be written."""

    exit_code = 7


class NoBenefitError(MoeplanError):
    """A plan does not pay on the trace that judged it."""

    exit_code = 8
