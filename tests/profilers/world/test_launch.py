"""What the environment tells of a launch by torchrun or srun."""

import pytest

from moeplan.errors import UsageError
from moeplan.profilers.world.launch import Launch, found_launch

ADDRESS = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "17001"}
NAMES = ("RANK", "WORLD_SIZE", *SLURM, *ADDRESS, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_STEP_ID")


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({}, None),
        ({"RANK": "3", "WORLD_SIZE": "4", **ADDRESS}, Launch(3, 4, "localhost", 29500)),
        ({**SLURM, **ADDRESS}, Launch(1, 2, "localhost", 29500)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, None),
        ({"RANK": "0"}, None),
    ],
)
def test_the_environment_tells_of_a_launch(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], told: Launch | None
) -> None:
    _only(monkeypatch, environment)
    assert found_launch() == told


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("one", "one"),
        ("one,two", "one"),
        ("gpu[007-012,20]", "gpu007"),
        ("gpu[3,5-7]-ib,login", "gpu3-ib"),
        ("rack[1-2]n[04-05],x", "rack1n04"),
        ("a.cluster,b.cluster", "a.cluster"),
    ],
)
def test_under_srun_rank_0_is_on_the_first_host_of_the_step(
    monkeypatch: pytest.MonkeyPatch, hosts: str, first: str
) -> None:
    _only(monkeypatch, {**SLURM, "SLURM_JOB_NODELIST": "elsewhere", "SLURM_STEP_NODELIST": hosts})
    assert found_launch() == Launch(1, 2, first, 15_001)
    _only(monkeypatch, {**SLURM, "SLURM_JOB_NODELIST": hosts, "SLURM_STEP_ID": "2"})
    assert found_launch() == Launch(1, 2, first, 15_001 + 2 * 97)
    _only(monkeypatch, {**SLURM, **ADDRESS, "SLURM_JOB_NODELIST": hosts})
    assert found_launch() == Launch(1, 2, "localhost", 29500)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "MASTER_ADDR and MASTER_PORT is not"),
        ({**SLURM}, "SLURM_PROCID is set but MASTER_ADDR is not"),
        ({"RANK": "0", "WORLD_SIZE": "2", **SLURM, "SLURM_JOB_NODELIST": "a"}, "RANK is set but MASTER_ADDR and"),
        ({"RANK": "0", "WORLD_SIZE": "4", **ADDRESS, "MASTER_PORT": "http"}, "expected a port"),
        ({"RANK": "4", "WORLD_SIZE": "4", **ADDRESS}, "expected 0 <= RANK < WORLD_SIZE"),
        ({"RANK": "-1", "WORLD_SIZE": "4", **ADDRESS}, "expected 0 <= RANK < WORLD_SIZE"),
        ({"RANK": "one", "WORLD_SIZE": "4", **ADDRESS}, "expected 0 <= RANK < WORLD_SIZE"),
    ],
)
def test_a_broken_launch_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], message: str
) -> None:
    _only(monkeypatch, environment)
    with pytest.raises(UsageError, match=message):
        found_launch()


def _only(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
