"""An engine that takes files of a plan: what it is asked, and what it answers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ...traces.model import ModelSpec
from ..plan import Plan

__all__ = ["MAX_BYTES", "SIDECAR", "Engine", "Expected", "Exported"]

SIDECAR = "moeplan.json"  # beside the files: what they are of, and for what
MAX_BYTES = 8 * 2**20  # of a JSON file; 61 layers of 288 slots take 85 kB


@dataclass(frozen=True, slots=True)
class Exported:
    """The files that carry a plan into an engine, and how it is started with them.

    Parameters
    ----------
    files
        Path inside the directory to text.
    command
        To paste, in the engine's own environment; `MODEL`, `NODE_RANK` and `HEAD` are the reader's.
    conditions
        When the engine ignores the files, refuses them or gains nothing, a sentence each.
    """

    files: Mapping[str, str]
    command: str
    conditions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Model and devices that a file is validated for.

    Parameters
    ----------
    model_type
        Of the model's config.json; None: not known.
    num_devices, redundant
        Expert-parallel ranks, and slots beyond the experts; None: what needs them is not checked, or read off the file.
    """

    model: ModelSpec
    model_type: str | None = None
    num_devices: int | None = None
    redundant: int | None = None


class Engine(Protocol):
    """An engine: its files and their rules.

    Parameters
    ----------
    version
        The one whose source was read for this.
    replica_rule
        How it chooses among an expert's replicas; None where it takes no placement.
    file
        The file of a directory that it is told of.
    """

    name: str
    version: str
    replica_rule: str | None
    file: str

    def export(self, plan: Plan, model: ModelSpec, directory: Path) -> Exported:
        """The files of a plan, which will lie in `directory`.

        Raises
        ------
        UsageError
            The engine cannot carry the plan out, by name of what it cannot.
        """

    def findings(self, path: Path, expected: Expected) -> Iterator[str]:
        """Faults that the engine would refuse in a file, or take and do wrong, one line each.

        Raises
        ------
        InputError
            It cannot be read as a file of this kind at all.
        """
