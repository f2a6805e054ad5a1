"""The command line starts light: what `--help` and `import moeplan.runtime` load, and how long help takes."""

import json
import resource
from importlib.metadata import version

import pytest

from moeplan.planner.cli.commands import COMMANDS, group
from moeplan.planner.cli.trace import COMMANDS as TRACE_COMMANDS
from tests.planner.cli.conftest import MAIN, python

HEAVY = ("torch", "ortools", "pulp", "scipy", "pyarrow", "numba")
REPORT = "import json, sys; print(json.dumps([m for m in sys.modules if '.' not in m]), file=sys.stderr)"
HELP = """
import sys; sys.argv = ['moeplan', *{args!r}]
from moeplan.planner.cli import main
try: main()
finally: {report}
"""


def loaded(code: str) -> set[str]:
    return set(json.loads(python("-c", code).stderr.splitlines()[-1]))


def cpu_s(code: str) -> float:
    """CPU seconds of a process, which other load leaves alone: the least of five."""

    def once() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        python("-c", code)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    return min(once() for _ in range(5))


@pytest.mark.parametrize("code", ["import moeplan.runtime", "import moeplan.profilers.cluster"])
def test_a_training_script_imports_the_runtime_without_anything_heavy(code: str) -> None:
    assert not loaded(f"{code}\n{REPORT}") & set(HEAVY)


def test_the_top_level_help_loads_neither_pydantic_nor_numpy_nor_anything_heavy() -> None:
    modules = loaded(HELP.format(args=["--help"], report=REPORT))
    assert not modules & {"pydantic", "numpy", *HEAVY}
    assert "typer" in modules


def test_the_version_is_that_of_what_is_installed() -> None:
    assert python(*MAIN, "--version").stdout == f"moeplan {version('moeplan')}\n"


@pytest.mark.parametrize("args", [*([c] for c in COMMANDS), *(["trace", c] for c in TRACE_COMMANDS)], ids=" ".join)
def test_a_commands_help_loads_nothing_heavy_and_has_an_example(args: list[str]) -> None:
    done = python("-c", HELP.format(args=[*args, "--help"], report=REPORT))
    assert (done.returncode, {*json.loads(done.stderr.splitlines()[-1])} & {*HEAVY}) == (0, set())
    assert args == ["trace"] or ("Example" in done.stdout and "--json" in done.stdout)
    *parents, name = args
    assert (group.load("trace") if parents else group).load(name).name == name


def test_help_takes_at_most_three_and_five_times_the_cpu_of_importing_typer() -> None:
    base = cpu_s("import typer")
    assert cpu_s(HELP.format(args=["--help"], report="pass")) < 3 * base
    assert cpu_s(HELP.format(args=["solve", "--help"], report="pass")) < 5 * base
