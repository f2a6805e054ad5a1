"""Ctrl-C and SIGTERM while packages are imported, some of which swallow them: sent from within, at no chance moment."""

import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from tests.planner.cli.conftest import python
from tests.warm import Finished

LONG = ("profile", "--cluster", "2x2")
NOTHING = {"SIGINT": "moeplan: interrupted; nothing was written\n", "SIGTERM": ""}
INTERRUPTIBLE = "import os, signal, sys, time\nfrom moeplan.planner.cli import interruptible\n"
RUN = """
import os, signal, sys, time, types

class Interrupting:
    "Ctrl-C as the first import of a module begins; what swallows it goes on as if nothing had been."

    def find_spec(self, name, path=None, target=None):
        if name != {module!r}:
            return None
        sys.meta_path.remove(self)
        try:
            exec("os.kill(os.getpid(), signal.{name}); time.sleep(0.01)")
        except BaseException:
            if not {swallowed}:
                raise
        {after}

sys.argv = ["moeplan", *{args!r}]
sys.meta_path.insert(0, Interrupting())
from moeplan.planner.cli import main
main()
"""


def run(folder: Path, module: str, *, swallowed: bool = True, **settings: Any) -> Finished:
    """The command line, sent a signal as the first import of a module begins."""
    code = RUN.format(
        module=module, swallowed=swallowed, **{"args": LONG, "after": "pass", "name": "SIGINT"} | settings
    )
    (folder / "interrupted").mkdir()
    (folder / "interrupted" / "__main__.py").write_text(code)
    return python("-B", "-m", "interrupted", cwd=folder)


@pytest.mark.parametrize("swallowed", [False, True])
@pytest.mark.parametrize(
    ("name", "code", "module"),
    [
        ("SIGINT", 130, "typer.main"),
        ("SIGINT", 130, "typer.core"),
        ("SIGINT", 130, "moeplan.planner.cli.commands"),
        ("SIGINT", 130, "moeplan.planner.cli.profile"),
        ("SIGINT", 130, "pydantic"),
        ("SIGINT", 130, "numpy"),
        ("SIGTERM", 143, "typer.main"),
        ("SIGTERM", 143, "pydantic"),
    ],
)
def test_a_signal_amid_an_import_ends_with_its_code_and_one_line_of_ctrl_c(
    tmp_path: Path, name: str, code: int, module: str, swallowed: bool
) -> None:
    done = run(tmp_path, module, swallowed=swallowed, name=name)
    assert (done.returncode, done.stderr) == (code, NOTHING[name])


def test_ctrl_c_names_the_files_that_were_written_before(tmp_path: Path) -> None:
    done = run(tmp_path, "moeplan.planner.report.profile", swallowed=False)
    assert (done.returncode, done.stderr) == (130, "moeplan: interrupted; wrote profile.json\n")
    assert (tmp_path / "profile.json").is_file()


@pytest.mark.parametrize("module", ["moeplan.planner.cli.plans", "pydantic"])
def test_an_expected_failure_after_a_swallowed_ctrl_c_is_still_ctrl_c(tmp_path: Path, module: str) -> None:
    done = run(tmp_path, module, args=("show", "none.json"))
    assert (done.returncode, "Traceback" in done.stderr) == (130, False)


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_swallowed_signal_comes_again_and_ends_what_would_take_long(tmp_path: Path, name: str, code: int) -> None:
    trap = "import moeplan.files; moeplan.files.write_json = lambda *_: time.sleep(45)"
    started = time.monotonic()
    done = run(tmp_path, "moeplan.profilers.profile", after=trap, name=name)
    assert done.returncode == code
    assert time.monotonic() - started < 40
    assert [path.name for path in tmp_path.iterdir()] == ["interrupted"]


def test_ctrl_c_amid_compiling_that_a_solver_answers_does_not_come_again() -> None:
    program = """
import numba
from numba.core.dispatcher import Dispatcher
def compile(self, signature):
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(9): pass
compile.__code__ = compile.__code__.replace(co_filename=Dispatcher.compile.__code__.co_filename)
Dispatcher.compile = compile
with interruptible():
    try:
        numba.njit(lambda x: x + 1)(1)
    except KeyboardInterrupt:
        print("answered")
    time.sleep(0.3)
    print("kept")
"""
    assert python("-c", INTERRUPTIBLE + program).stdout.split() == ["answered", "kept"]


@pytest.mark.parametrize(
    "place",
    [
        "class Gone:\n    def __del__(self): signalled()\nGone()",
        "import weakref\nclass Gone: pass\ngone = Gone(); weak = weakref.ref(gone, lambda _: signalled()); del gone",
        "import ctypes\nctypes.CFUNCTYPE(None)(signalled)()",
    ],
    ids=["finalizer", "weak reference", "callback of C"],
)
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_where_none_can_be_passed_on_comes_again_and_is_not_printed(name: str, code: int, place: str) -> None:
    """As compilers have such places."""
    program = f"""{INTERRUPTIBLE}
def signalled():
    os.kill(os.getpid(), signal.{name})
    for _ in range(9): pass
with interruptible():
{textwrap.indent(place, "    ")}
    time.sleep(45)
"""
    started = time.monotonic()
    done = python("-c", program)
    assert (done.returncode, done.stderr) == (code, NOTHING[name])
    assert time.monotonic() - started < 40


def test_what_finalizers_fail_of_is_still_printed() -> None:
    program = "class Gone:\n    def __del__(self): 1 / 0\nwith interruptible(): Gone()"
    done = python("-c", INTERRUPTIBLE + program)
    assert (done.returncode, "ZeroDivisionError" in done.stderr) == (0, True)


def test_where_ctrl_c_is_ignored_it_stays_so(tmp_path: Path) -> None:
    code = RUN.format(module="numpy", args=LONG, swallowed=False, after="pass", name="SIGINT")
    ignoring = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    assert python("-c", f"{ignoring}\n{code}", cwd=tmp_path).returncode == 0
    assert (tmp_path / "profile.json").is_file()


def test_cleaning_up_after_ctrl_c_may_take_longer_than_a_swallowed_one_pauses(tmp_path: Path) -> None:
    code = """
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
with interruptible():
    try:
        sys.meta_path.insert(0, Interrupting())
        import moeplan.planner.plainly_absent
    finally:
        sys.meta_path.pop(0)
        time.sleep(0.2)
        print("cleaned up", flush=True)
"""
    done = python("-c", INTERRUPTIBLE + code, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (130, "cleaned up\n")
