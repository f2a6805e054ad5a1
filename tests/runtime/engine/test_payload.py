"""Columns of several kinds as rows of bytes, there and back."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from moeplan.runtime.engine.payload import Columns

KINDS = (torch.uint8, torch.bfloat16, torch.float32, torch.int32, torch.float64, torch.int64)


@given(st.integers(0, 5), st.lists(st.tuples(st.integers(1, 9), st.sampled_from(KINDS)), min_size=1, max_size=4))
def test_columns_come_back_as_they_were(num_rows: int, kinds: list[tuple[int, torch.dtype]]) -> None:
    many = [torch.arange(num_rows * width * 3).view(num_rows, 3 * width) % 100 for width, _ in kinds]
    sent = [column.to(dtype)[:, ::3] for column, (_, dtype) in zip(many, kinds, strict=True)]
    columns = Columns.of(*sent)
    rows = columns.pack(*sent)
    assert columns.kinds == tuple(kinds)
    for unpacked, expected in zip(columns.unpack(rows), sent, strict=True):
        assert unpacked.dtype == expected.dtype
        assert torch.equal(unpacked, expected)


def test_what_has_no_rows_travels_whatever_its_strides() -> None:
    none = torch.zeros(1, 1, dtype=torch.int32).expand(1, 3)[:0]
    columns = Columns.of(none, torch.zeros(0, 2))
    assert columns.pack(none, torch.zeros(0, 2)).shape == (0, 20)


def test_there_is_no_more_padding_than_elements_need_to_be_read_where_they_lie() -> None:
    x, gates, ids = torch.zeros(2, 5), torch.zeros(2, 1), torch.zeros(2, 1, dtype=torch.int32)
    assert Columns.of(x, gates, ids).pack(x, gates, ids).shape == (2, 28)
    assert Columns.of(ids, x.double()).pack(ids, x.double()).shape == (2, 48)
    assert Columns.of(x.double(), ids).pack(x.double(), ids).shape == (2, 48)
    assert Columns.of(x.bfloat16(), ids).pack(x.bfloat16(), ids).shape == (2, 16)
