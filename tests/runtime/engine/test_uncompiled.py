"""Functions that torch.compile leaves as they are."""

import subprocess
import sys
from typing import Any

import torch

from moeplan.runtime.engine.uncompiled import uncompiled

COMPILING = list[bool]()

ALONE = """
import sys, torch
from moeplan.runtime.engine.uncompiled import uncompiled
assert uncompiled(lambda x: x + 1)(torch.zeros(1)) == 1
print(*sys.modules)
"""


@uncompiled
def traced(x: torch.Tensor) -> torch.Tensor:
    """One more; notes whether it is compiled."""
    COMPILING.append(torch.compiler.is_compiling())
    return x + 1


def test_compiled_code_calls_it_as_it_is_and_is_compiled_around_it() -> None:
    graphs = list[Any]()

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda x: 3 * traced(x.sin()), backend=backend)
    x = torch.arange(3.0)
    COMPILING.clear()
    assert torch.equal(compiled(x), 3 * (x.sin() + 1))
    assert COMPILING == [False]
    assert len(graphs) == 2


def test_a_call_alone_loads_no_compiler() -> None:
    result = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True)
    assert "torch._dynamo" not in result.stdout.split()
