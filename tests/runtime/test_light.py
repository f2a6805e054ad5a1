"""What imports cost a script."""

import subprocess
import sys

import pytest

import moeplan.runtime

HEAVY = ("torch", "ortools", "pulp", "scipy", "pyarrow", "numba")
VIEW = (
    "from moeplan.runtime.models.huggingface import view;"
    "from moeplan.planner.demo.model import MoELanguageModel, ModelConfig; view(MoELanguageModel(ModelConfig()))"
)


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import moeplan.runtime", (*HEAVY, "numpy", "pydantic")),
        ("import moeplan.traces", (*HEAVY, "numpy", "pydantic")),
        ("import moeplan.runtime.active; from moeplan.runtime import load_plan", HEAVY),
        ("from moeplan.runtime import exports", ("torch", "yaml", "scipy", "pyarrow")),
        (VIEW, ("transformers",)),
    ],
)
def test_an_import_loads_nothing_heavy(code: str, heavy: tuple[str, ...]) -> None:
    script = f"import sys; {code}; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {*result.stdout.split()} & {*heavy}


def test_every_public_name_of_the_runtime_is_a_callable_however_often_it_is_asked_for_and_others_are_none() -> None:
    for _ in range(2):
        assert all(callable(getattr(moeplan.runtime, name)) for name in moeplan.runtime.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        moeplan.runtime.nothing  # noqa: B018
