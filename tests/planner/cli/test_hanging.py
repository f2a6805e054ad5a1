import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from moeplan.planner.cli.hanging import HangingConsole, hung


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("solved    in no time at all", "solved    in no time\n          at all"),
        ("left out  samples that a plan saw", "left out  samples\n          that a plan\n          saw"),
        ("unchecked seconds and the method", "unchecked seconds and\n          the method"),
        ("coherence gathers K and V everywhere", "coherence gathers K\n  and V everywhere"),
        ("in all 3 MB less than contiguous", "in all 3 MB less than\n  contiguous"),
        ("wrote     /a/path/that/is/longer/than/that", "wrote\n          /a/path/that/is/longer/than/that"),
        ("  0  ####  kept", "  0  ####  kept"),
        ("", ""),
    ],
)
def test_lines_go_on_below_the_text_of_their_label_or_by_two(line: str, told: str) -> None:
    assert hung(line, 21) == told


@given(st.text(alphabet="ab \n", max_size=80), st.integers(12, 40))
def test_words_and_their_order_stay_and_no_line_is_wider(text: str, width: int) -> None:
    told = hung(text, width)
    assert told.split() == text.split()
    assert all(len(line) <= width or len(line.split()) == 1 for line in told.split("\n"))


def test_a_console_hangs_text_and_leaves_tables_to_rich(capsys: pytest.CaptureFixture[str]) -> None:
    console, table = HangingConsole(20), Table("[bold]a[/]", box=None)
    table.add_row("b")
    console.print("a remark that is :smile: [red]long[/]")
    console.print(table)
    assert capsys.readouterr().out == "a remark that is\n  :smile:\n  [red]long[/]\n [bold]a[/] \n b          \n"
