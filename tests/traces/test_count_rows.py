"""Adding up rows of the count form in bounded memory."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from moeplan.traces import loads
from moeplan.traces.count_form import CountTable, condense, read_counts, write_counts
from moeplan.traces.schema import TraceMeta


def total(tables: list[CountTable]) -> dict[tuple[int, int], list[int]]:
    found: dict[tuple[int, int], list[int]] = {}
    for table in tables:
        assert table.step is None
        assert table.sample is not None
        for sample, layer, counts in zip(table.sample, table.layer, table.counts, strict=True):
            row = found.setdefault((int(sample), int(layer)), [0] * 6)
            found[int(sample), int(layer)] = [a + b for a, b in zip(row, counts.tolist(), strict=True)]
    return found


@pytest.mark.parametrize("most_rows", [1, 4, 10_000])
def test_rows_of_equal_keys_add_up(
    tmp_path: Path, meta: TraceMeta, monkeypatch: pytest.MonkeyPatch, most_rows: int
) -> None:
    rng = np.random.default_rng(0)
    tables = [
        CountTable(
            sample=rng.integers(-3, 4, 50),
            layer=rng.integers(0, 3, 50).astype(np.int32),
            counts=rng.integers(0, 9, (50, 6)),
        )
        for _ in range(3)
    ]
    write_counts(tmp_path / "counts", meta.model_copy(update={"form": "counts"}), tables)
    monkeypatch.setattr(loads, "MAX_BYTES", most_rows * 8 * 6)
    found = list(condense(read_counts(tmp_path / "counts")))
    assert total(found) == total(tables)
    assert max(map(len, found)) <= most_rows
    if most_rows == 10_000:
        (table,) = found
        assert table.sample is not None
        keys = list(zip(table.sample.tolist(), table.layer.tolist(), strict=True))
        assert keys == sorted(set(keys))
        assert max(Counter(keys).values()) == 1
