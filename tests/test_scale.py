"""Commands of docs/scale.md run as they stand, on schedulers that are started on this machine."""

import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "scale.md").read_text(encoding="utf-8")
PACKAGES = {"Ray, beside vLLM or verl": "ray", "Dask": "distributed"}
PYTHON = shlex.quote(sys.executable)
COMMANDS = {  # scripts of a virtual environment break when it is moved
    "moeplan": f'exec {PYTHON} -I -m moeplan.planner.cli "$@"',
    "ray": f'exec {PYTHON} -c "import sys; from ray.scripts.scripts import main; sys.argv[0] = \'ray\'; main()" "$@"',
    "dask": f'exec {PYTHON} -m dask "$@"',
    # What srun does, for -n N COMMAND: N processes at once, each told its number.
    "srun": 'shift; N=$1; shift; for i in $(seq 0 $((N - 1))); do SLURM_PROCID=$i SLURM_NTASKS=$N "$@" & done; wait',
}


def sections() -> dict[str, str]:
    """The commands of each section that can be run here, as one script."""
    found = {}
    for title, text in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE):
        blocks = re.findall(r"^```\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        if script := "".join(block for block in blocks if not block.startswith("pip")):
            found[title] = script
    return found


@pytest.mark.parametrize("title", sections())
def test_the_commands_of_a_section_give_the_counts_of_one_process(title: str, tmp_path: Path) -> None:
    package = PACKAGES.get(title)
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    places = tmp_path / "bin"
    places.mkdir()
    for name, line in COMMANDS.items():
        (places / name).write_text(f"#!/bin/bash\n{line}\n")
        (places / name).chmod(0o755)
    env = os.environ | {"PATH": f"{places}:{os.environ['PATH']}", "COLUMNS": "100"}
    with (tmp_path / "said").open("w+") as said:
        script = ["bash", "-ec", sections()[title]]
        process = subprocess.Popen(script, cwd=tmp_path, env=env, stdout=said, stderr=said, start_new_session=True)
        try:
            code = process.wait(timeout=120)
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # what stays in the background
        said.seek(0)
        assert code == 0, said.read()
    alone = [str(places / "moeplan"), *["trace", "count", "traces", "-o", "alone", "--workers", "1"]]
    subprocess.run(alone, cwd=tmp_path, check=True, capture_output=True)
    parts = [[path.read_bytes() for path in sorted((tmp_path / name).iterdir())] for name in ("counts", "alone")]
    assert parts[0] == parts[1]


def test_every_scheduler_of_the_page_is_run() -> None:
    assert [*sections()] == ["One machine", "SLURM", *PACKAGES]
