"""Processes that start at once: forks of an interpreter that has imported what they need.

As a script, `warm.py MODULE FUNCTION PACKAGE...`, it is that interpreter: it imports the packages with all their
modules, reads one request a line in JSON and answers with an exit code.
"""

import atexit
import contextlib
import gc
import json
import os
import pkgutil
import signal
import subprocess
import sys
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
    command = [sys.executable, __file__, module, function, *packages]
    with (
        TemporaryDirectory() as folder,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as interpreter,
    ):
        streams = [Path(folder, name) for name in ("out", "err")]

        def start(args: Sequence[str], cwd: Path, env: Mapping[str, str]) -> Finished:
            assert interpreter.stdin is not None
            assert interpreter.stdout is not None
            for stream in streams:
                stream.write_text("")
            interpreter.stdin.write(json.dumps([args, str(cwd), {**env}, *map(str, streams)]) + "\n")
            interpreter.stdin.flush()
            code = int(interpreter.stdout.readline())
            return Finished(args, code, *(stream.read_text() for stream in streams))

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
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        print(code, flush=True)


def become(call: Callable[[], None], args: Sequence[str], cwd: str, env: Mapping[str, str], out: str, err: str) -> None:
    """Be a process that was started with these arguments, there, and end as it does."""
    os.setsid()
    signal.alarm(LIMIT_S)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for stream, (name, mode) in enumerate([(os.devnull, os.O_RDONLY), (out, os.O_WRONLY), (err, os.O_WRONLY)]):
        os.dup2(os.open(name, mode), stream)
    sys.argv[1:] = args
    code: object = 1
    try:
        call()
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException:  # noqa: BLE001
        sys.excepthook(*sys.exc_info())
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    main(*sys.argv[1:])
