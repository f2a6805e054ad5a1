"""What --workers does not name, and where nothing answers: one line each, with exit code 2, soon."""

import contextlib
import importlib.util
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Never

import pytest

from moeplan.errors import UsageError
from moeplan.workers import backend_of, clusters, opened
from tests.workers import cases

PACKAGES = {"ray": "ray", "dask": "distributed"}
SOON_S = 30  # 3 s, and the start of three commands at once
COMMAND = """
from moeplan.planner.cli import main
from moeplan.workers import clusters
clusters.ANSWER_S = 3
main()
"""
NONE = ("", "0", "-1", "-3", "1e9", "nan", "99999", "many", "slurm", "dask", "dask://", "dask://host", "dask://x:99999")
NO_RAY = ("ray:/x", "ray://", "ray://a b:1", "ray://x:65536", "ray://x:-1", "ray://x:1:2")


@pytest.mark.parametrize("text", [*NONE, *NO_RAY])
def test_what_names_no_workers_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected auto, a number of processes, ray, "), opened(text):
        pass


@pytest.mark.parametrize(("text", "package"), [("ray", "ray"), ("ray://h:1", "ray"), ("dask://h:1", "distributed")])
def test_an_extra_that_is_absent_is_named(text: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=rf"{package} is not installed; expected pip install 'moeplan\["), opened(text):
        pass


def test_a_cluster_of_other_versions_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def joined(_: str) -> Never:  # what ray.init raises
        raise RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.60.0\n    Python: 3.11.7\n")

    monkeypatch.setitem(clusters.CLUSTERS, "ray", joined)
    said = r"^--workers ray: cannot be joined \(Version mismatch: .* Ray: 2.60.0 Python: 3.11.7\); expected the same "
    with pytest.raises(UsageError, match=said), opened("ray"):
        pass


@contextlib.contextmanager
def silent() -> Iterator[str]:
    """A host and port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("host", ["nohost.invalid:1", "localhost:1"])
@pytest.mark.parametrize(("scheme", "package"), PACKAGES.items())
def test_a_host_that_does_not_listen_is_named(
    scheme: str, package: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed: pip install 'moeplan[{scheme}]'")
    monkeypatch.setattr(clusters, "ANSWER_S", 1)
    monkeypatch.setenv(clusters.RAY_TRY_S, "1")
    with pytest.raises(UsageError, match=rf"^--workers {scheme}://{host}: nothing answers there \("):
        backend_of(f"{scheme}://{host}")


def test_a_command_says_in_one_line_where_nothing_answers(tmp_path: Path) -> None:
    schemes = [scheme for scheme, package in PACKAGES.items() if importlib.util.find_spec(package) is not None]
    if not schemes:
        pytest.skip("neither ray nor dask is installed: pip install 'moeplan[dask,ray]'")
    cases.written(tmp_path / "traces")
    with silent() as address:
        names = [f"{scheme}://{address}" for scheme in schemes]
        started, commands = time.monotonic(), [asked(name, tmp_path) for name in ("-3", *names)]
        said = [command.communicate(timeout=SOON_S) for command in commands]
    assert time.monotonic() - started < SOON_S
    assert [command.returncode for command in commands] == [2] * len(commands)
    assert "expected auto, a number of processes" in said[0][1]
    for name, (out, errors) in zip(names, said[1:], strict=True):
        assert (out, errors.count("\n")) == ("", 1), errors
        assert f"--workers {name}: nothing answers there (" in errors


def asked(workers: str, folder: Path) -> "subprocess.Popen[str]":
    words = [sys.executable, "-I", "-c", COMMAND, "trace", "info", "traces", "--workers", workers]
    pipe = subprocess.PIPE
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, cwd=folder)
