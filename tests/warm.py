"""Processes that start at once: forks of an interpreter that has imported what they need.

As a script, `warm.py MODULE FUNCTION PACKAGE...`, it is that interpreter: it imports the packages with all their
modules, reads one request a line in JSON and answers with an exit code.
"""

import contextlib
import gc
import itertools
import json
import os
import pkgutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

LIMIT_S = 300  # the longest that a process may take
Finished = subprocess.CompletedProcess[str]
Start = Callable[[Sequence[str], Path, Mapping[str, str]], Finished]


@contextlib.contextmanager
def warm(module: str, function: str, *packages: str, env: Mapping[str, str]) -> Iterator[Start]:
    """`start(args, cwd, env)` calls a function in a process of its own, and ends all that are left of its group."""
    command, pipe = [sys.executable, __file__, module, function, *packages], subprocess.PIPE
    with (
        TemporaryDirectory() as folder,
        Path(folder, "errors").open("w+") as errors,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=env) as interpreter,
    ):
        numbers = itertools.count()

        def start(args: Sequence[str], cwd: Path, env: Mapping[str, str]) -> Finished:
            assert interpreter.stdin is not None
            assert interpreter.stdout is not None
            number = next(numbers)  # files of their own: processes that outlive a request may still write
            streams = [Path(folder, f"{name}-{number}") for name in ("out", "err")]
            interpreter.stdin.write(json.dumps([args, str(cwd), {**env}, *map(str, streams)]) + "\n")
            interpreter.stdin.flush()
            answer = interpreter.stdout.readline().split()
            assert answer, f"the warm interpreter ended: {Path(errors.name).read_text()}"
            assert answer[1:] == ["alone"], f"{args} left processes behind"
            return Finished(args, int(answer[0]), *(stream.read_text() for stream in streams))

        yield start
        interpreter.communicate()


def main(module: str, function: str, *packages: str) -> None:
    """Import, then answer requests until there are no more."""
    for package in map(import_module, packages):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.endswith("__main__"):
                import_module(found.name)
    call = getattr(import_module(module), function)
    gc.freeze()  # a fork's collections would copy all of it
    for request in sys.stdin:
        if not (pid := os.fork()):
            become(call, *json.loads(request))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(code, "alone" if is_gone(pid) else "not alone", flush=True)


def is_gone(group: int) -> bool:
    """Whether processes of a group end by themselves, soon; others are killed."""
    try:
        for _ in range(50):
            os.killpg(group, 0)
            time.sleep(0.1)
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return True
    return False


def become(call: Callable[[], None], args: Sequence[str], cwd: str, env: Mapping[str, str], out: str, err: str) -> None:
    """Be a process that was started with these arguments, there, and end as it does."""
    os.setsid()
    signal.alarm(LIMIT_S)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, name in ((1, out), (2, err)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), stream)
    sys.argv[1:] = args
    call()
    sys.exit()


if __name__ == "__main__":
    del sys.path[0]  # where folders are named as those of the product
    main(*sys.argv[1:])
