"""Figures as screens show them."""

import pytest

from moeplan.planner.figures import bytes_text


@pytest.mark.parametrize(
    ("number", "text"),
    [(999.4e6, "999 MB"), (1e9, "1.00 GB"), (99.96e9, "100 GB"), (3e11, "300 GB"), (1.3e12, "1.30 TB"), (0, "0 MB")],
)
def test_bytes_have_three_digits_and_the_unit_that_suits(number: float, text: str) -> None:
    assert bytes_text(number) == text
