"""The wheel holds what the tree holds, and nothing more."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("planner", "profilers", "runtime", "solvers", "traces", "workers")


def tree_packages() -> set[str]:
    found = {path.parent.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    return {"moeplan", *(".".join(("moeplan", *path.parts)) for path in found)}


def tree_files() -> set[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    at_root = {"__init__.py", "errors.py", "files.py", "py.typed"}
    return {f"moeplan/{name}" for name in listed if name in at_root or name.split("/")[0] in ROOMS}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built from a copy of what git tracks."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "--null", "-T-", "-cf", out / "tree.tar"], cwd=ROOT, input=files, check=True)
    subprocess.run(["tar", "-xf", out / "tree.tar"], cwd=source, check=True)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w"]
    subprocess.run([*command, str(out), str(source)], check=True)
    return zipfile.ZipFile(next(out.glob("*.whl")))


def test_the_list_of_packages_is_the_tree() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert len(declared) == len(set(declared))
    assert set(declared) == tree_packages()


def test_the_wheel_has_every_file_of_the_rooms_and_no_other_name(wheel: zipfile.ZipFile) -> None:
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == tree_files()
    assert {name.split("/")[0].split("-")[0] for name in wheel.namelist()} == {"moeplan"}
