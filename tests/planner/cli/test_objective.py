"""`--objective copies` from the command line: fewer copies replayed than by hops, certified, and nothing else taken."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="module")
def home(moeplan: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace in which experts 0 to 3 come first, and each takes its own of the experts 4 to 7 along."""
    folder, rng = tmp_path_factory.mktemp("objective"), np.random.default_rng(1)
    first = np.cumsum(rng.random((4000, 3)) < 0.6, axis=1) % 4
    np.save(folder / "ids.npy", np.stack([first, 7 - first], axis=2).astype(np.uint8))
    moeplan("trace", "import", "ids.npy", "-o", "traces", "--num-experts", "8", cwd=folder)
    return folder


def copies(moeplan: Any, home: Path, objective: str) -> Any:
    found = moeplan("solve", "--cluster", "1x4", "--time-limit", "1", "--objective", objective, "--json", cwd=home)
    return json.loads(found.stdout)["evaluation"]["held_out"]["contenders"][0]["metrics"]["device_copies"]["value"]


def test_copies_as_objective_give_fewer_copies_than_hops(moeplan: Any, home: Path) -> None:
    assert copies(moeplan, home, "copies") < 0.9 * copies(moeplan, home, "hops")


def test_such_a_plan_is_shown_by_its_objective_and_certified_until_it_is_edited(moeplan: Any, home: Path) -> None:
    copies(moeplan, home, "copies")
    assert "experts and the first before" in " ".join(moeplan("show", cwd=home).stdout.split())
    assert "objective, bound" in " ".join(moeplan("certify", "plan.json", "--trace", "traces", cwd=home).stdout.split())
    plan = json.loads((home / "plan.json").read_text())
    plan["options"]["placement"]["search"]["objective"] = "hops"
    (home / "edited.json").write_text(json.dumps(plan))
    assert "objective" in moeplan("certify", "edited.json", "--trace", "traces", cwd=home, code=5).stderr
