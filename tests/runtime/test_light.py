"""What importing the runtime costs a training script."""

import subprocess
import sys

import pytest

import moeplan.runtime

HEAVY = ("torch", "ortools", "pulp", "scipy", "pyarrow", "numba")


def loaded_after(code: str) -> set[str]:
    script = f"import sys; {code}; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


@pytest.mark.parametrize("code", ["import moeplan.runtime.active", "from moeplan.runtime import load_plan"])
def test_importing_the_runtime_and_the_plan_loads_nothing_heavy(code: str) -> None:
    assert loaded_after(code).isdisjoint(HEAVY)


def test_importing_the_runtime_alone_loads_neither_numpy_nor_pydantic() -> None:
    assert loaded_after("import moeplan.runtime").isdisjoint({"numpy", "pydantic"})


def test_every_public_name_of_the_runtime_is_a_callable_however_often_it_is_asked_for() -> None:
    for _ in range(2):
        assert all(callable(getattr(moeplan.runtime, name)) for name in moeplan.runtime.__all__)


def test_a_name_the_runtime_does_not_have_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        moeplan.runtime.nothing  # noqa: B018
