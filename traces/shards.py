"""Partial counts of a trace, by processes that know of each other only how many they are, and their sum.

A shard is a directory `shard-{number}-of-{count}-{digest}`, there whole or not at all. The digest is of what was
counted: the trace's listing and the phases. In it are the counts, and a file that says how many parts these have, so
that a copy of it that lacks some is noticed.
"""

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from ..errors import InputError, MismatchError, UsageError
from ..files import atomic_directory, sha256_json
from ..workers import SERIAL, Workers
from .count_form import CountTrace, meta_of_counts, read_counts, tabulate, write_counts
from .part_file import local_directory
from .reader import Trace

NAME = re.compile(r"shard-(0|[1-9][0-9]{0,5})-of-([1-9][0-9]{0,5})-([0-9a-f]{12})")
COUNTS, PARTS = "counts", "parts"
EXPECTED = "expected K/N, from 0/N to (N-1)/N"


@dataclass(frozen=True, slots=True)
class Shard:
    """One of several processes that count a trace."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Shard K of N from "K/N"; UsageError where that is no shard."""
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        if found is None or not int(found[1]) < int(found[2]):
            raise UsageError(f"--shard-of {text}; {EXPECTED}")
        return cls(int(found[1]), int(found[2]))

    @classmethod
    def of_slurm(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """The shard of this process among those of `srun`; UsageError outside of it."""
        try:
            return cls.parse(f"{environment['SLURM_PROCID']}/{environment['SLURM_NTASKS']}")
        except KeyError as error:
            raise UsageError(
                f"--shard without {error.args[0]} in the environment; expected a start by srun, or --shard-of K/N"
            ) from None

    def part_of(self, trace: Trace) -> Trace:
        """The parts of the trace that are this shard's, about as many rows as any other's; there may be none."""
        rows = np.array([stamp.num_rows for stamp in trace.stamps])
        shard_of_part = (np.cumsum(rows) - (rows + 1) // 2) * self.count // trace.num_rows
        first, end = np.searchsorted(shard_of_part, [self.number, self.number + 1])
        return trace.of_parts(int(first), int(end))


def write_shard(
    trace: Trace,
    shard: Shard,
    directory: str,
    *,
    phases: Collection[str] | None = None,
    workers: Workers = SERIAL,
) -> tuple[Trace, tuple[Path, ...]]:
    """Count the parts of a trace that are a shard's, unless that was done; these parts, and those of the counts."""
    digest = sha256_json([trace.listing_sha256, sorted(phases or ())])[:12]
    path = local_directory(directory) / f"shard-{shard.number}-of-{shard.count}-{digest}"
    part = shard.part_of(trace)
    if path.exists():
        return part, _parts(path)
    tables = tabulate(part, phases=phases, may_lack=True, workers=workers) if part.num_rows else ()
    with atomic_directory(path) as temporary:
        parts = write_counts(temporary / COUNTS, meta_of_counts(trace), tables)
        (temporary / PARTS).write_text(f"{len(parts)}\n")
    return part, tuple(path / COUNTS / one.name for one in parts)


def _parts(shard: Path) -> tuple[Path, ...]:
    """The parts of a shard's counts; InputError where some are not there."""
    told, counts = shard / PARTS, shard / COUNTS
    expected = told.read_text().strip() if told.is_file() else "unknown"
    parts = tuple(sorted(counts.iterdir())) if counts.is_dir() else ()
    if expected != str(len(parts)):
        raise InputError(
            f"{shard}: {len(parts)} parts of counts, {expected} were written; copy it whole, or remove it and count"
            " that shard again"
        )
    return parts


def is_sharded(path: str) -> bool:
    """Check whether a local directory holds shards."""
    return os.path.isdir(path) and any(map(NAME.fullmatch, os.listdir(path)))


def read_shards(path: str) -> list[CountTrace]:
    """The shards in a directory, in order; those without tokens are left out.

    Raises
    ------
    InputError
        One is missing, or there are no tokens in any.
    MismatchError
        The shards are of several traces, or of several ways to count one.
    """
    found = sorted(filter(None, map(NAME.fullmatch, os.listdir(path))), key=lambda name: int(name[1]))
    if len(kinds := {(name[2], name[3]) for name in found}) > 1:
        raise MismatchError(
            f"{path}: shards of {len(kinds)} countings ({found[0][0]}, ...); the trace changed meanwhile, or --phase or"
            " the number of processes did: count again into an empty directory"
        )
    count = int(found[0][2])
    if more := [name[0] for name in found if int(name[1]) >= count]:
        raise InputError(f"{path}: {more[0]} is none of {count} shards, which are numbered from 0; remove it")
    if missing := sorted({*range(count)} - {int(name[1]) for name in found}):
        raise InputError(
            f"{path}: {len(found)} shards of {count}, {missing[0]} is missing; its process died or is still at it: run"
            f" again what wrote them, or that one with --shard-of {missing[0]}/{count}"
        )
    places = [Path(path) / name[0] for name in found]
    shards = [read_counts(place / COUNTS) for place in places if _parts(place)]
    if not shards:
        raise InputError(f"{path}: no tokens in any of {count} shards; expected some of these phases")
    if other := [shard.path for shard in shards if (shard.meta, shard.known) != (shards[0].meta, shards[0].known)]:
        raise MismatchError(f"{other[0]}: of another trace than {shards[0].path}; count again into an empty directory")
    return shards
