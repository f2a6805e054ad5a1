"""Files as accidents and attackers leave them: one file of a recording changed, from a seed.

`mutants(files, seed, count)` takes and gives {file name: bytes}; it knows no format but zip archives, whose members are
changed inside an archive that is whole again.
"""

import io
import random
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping

__all__ = ["mutants"]

NUMBERS = (b"-1", b"0", b"65535", b"65536", b"2147483648", b"9223372036854775808", b"1e999", b"NaN", b"null", b'"7"')
EDGES = (0, 1, 0x7F, 0x80, 0xFF)


def mutants(files: Mapping[str, bytes], seed: int, count: int) -> Iterator[dict[str, bytes]]:
    """The files, each time with another change to one of them (or without one of them)."""
    rng = random.Random(seed)
    names = sorted(files)
    for _ in range(count):
        name = rng.choice(names)
        if len(names) > 1 and rng.random() < 0.03:
            yield {other: data for other, data in files.items() if other != name}
            continue
        yield {**files, name: _changed(files[name], rng)}


def _changed(data: bytes, rng: random.Random) -> bytes:
    if data.startswith(b"PK") and rng.random() < 0.6:
        return _rezipped(data, rng)
    changes = BINARY + TEXT if data[:1] in b"{[l" else BINARY
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        data = rng.choice(changes)(data, rng)
    return data


def _rezipped(data: bytes, rng: random.Random) -> bytes:
    """An archive with one member changed, checksums right."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members: dict[str, bytes] = {info.filename: archive.read(info) for info in archive.infolist()}
    chosen = rng.choice(sorted(members))
    if rng.random() < 0.5:  # where most of the structure is
        chosen = next((name for name in members if name.endswith("data.pkl")), chosen)
    stream = io.BytesIO()
    with zipfile.ZipFile(
        stream, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    ) as new:
        for name, content in members.items():
            new.writestr(name, rng.choice(BINARY)(content, rng) if name == chosen else content)
    return stream.getvalue()


def _place(data: bytes, rng: random.Random) -> int:
    """Anywhere, but more often near the beginning, where headers are."""
    return rng.randrange(min(len(data), rng.choice((64, 512, len(data) + 1))) or 1) if data else 0


def _flipped(data: bytes, rng: random.Random) -> bytes:
    at = _place(data, rng)
    return data[:at] + bytes([byte ^ 1 << rng.randrange(8) for byte in data[at : at + 1]]) + data[at + 1 :]


def _edged(data: bytes, rng: random.Random) -> bytes:
    at = _place(data, rng)
    return data[:at] + bytes([rng.choice(EDGES)]) + data[at + 1 :]


def _inflated(data: bytes, rng: random.Random) -> bytes:
    """A word of all ones or of a great number, as a size would be."""
    at, width = _place(data, rng), rng.choice((2, 4, 8))
    value = rng.choice(((1 << 8 * width) - 1, (1 << 8 * width - 1) - 1, 1 << 8 * width - 2))
    return data[:at] + value.to_bytes(width, rng.choice(("little", "big"))) + data[at + width :]


def _truncated(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _spliced(data: bytes, rng: random.Random) -> bytes:
    """A piece of the file once more, somewhere else."""
    start, at = rng.randrange(len(data) + 1), _place(data, rng)
    return data[:at] + data[start : start + rng.randrange(1, 200)] + data[at:]


def _cut(data: bytes, rng: random.Random) -> bytes:
    at = _place(data, rng)
    return data[:at] + data[at + rng.randrange(1, 100) :]


def _numbered(data: bytes, rng: random.Random) -> bytes:
    """Another number for one there is."""
    found = list(re.finditer(rb"-?[0-9]+(\.[0-9]+)?", data))
    return _replaced(data, rng.choice(found), rng.choice(NUMBERS)) if found else data


def _unkeyed(data: bytes, rng: random.Random) -> bytes:
    """A key, or a key with its number or word, gone or renamed."""
    found = list(re.finditer(rb'"[a-z_]+": ?("[^"]{0,40}"|-?[0-9]+)?,? ?', data))
    return _replaced(data, rng.choice(found), rng.choice((b"", b'"x": '))) if found else data


def _relined(data: bytes, rng: random.Random) -> bytes:
    """A line gone, twice, or elsewhere."""
    lines = data.splitlines(keepends=True)
    line = lines.pop(rng.randrange(len(lines))) if lines else b""
    for _ in range(rng.randrange(3)):
        lines.insert(rng.randrange(len(lines) + 1), line)
    return b"".join(lines)


def _nested(data: bytes, rng: random.Random) -> bytes:
    at = _place(data, rng)
    return data[:at] + rng.choice((b"[", b'{"a":')) * rng.choice((1, 2, 50_000)) + data[at:]


def _replaced(data: bytes, found: "re.Match[bytes]", by: bytes) -> bytes:
    return data[: found.start()] + by + data[found.end() :]


Change = Callable[[bytes, random.Random], bytes]
BINARY: list[Change] = [_flipped, _edged, _inflated, _truncated, _spliced, _cut]
TEXT: list[Change] = [_numbered, _numbered, _unkeyed, _unkeyed, _relined, _nested]
