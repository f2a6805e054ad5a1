"""Ask vLLM's own policy table what it answers once its own loader has run the plugins on PYTHONPATH; prints JSON.

LAYERS EXPERTS SLOTS RANKS of a question. A plain `import vllm` needs kernels; the packages are registered bare.
"""

import importlib
import json
import logging
import sys
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch


def bare(name: str, folder: Path) -> None:
    """A package of that name whose modules are found in `folder`, without its own code having run."""
    module = types.ModuleType(name)
    module.__path__ = [str(folder)]
    sys.modules[name] = module


def main(num_layers: int, num_experts: int, num_slots: int, num_ranks: int) -> None:
    """The rows that vLLM would rearrange its experts to."""
    logging.basicConfig(level=logging.INFO)
    found = find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    folder = Path(found.origin).parent
    for name in ("vllm", "vllm.distributed", "vllm.distributed.eplb", "vllm.config"):
        bare(name, folder.joinpath(*name.split(".")[1:]))
    parallel: Any = types.ModuleType("vllm.config.parallel")
    parallel.EPLBPolicyOption = Literal["default"]
    sys.modules["vllm.config.parallel"] = parallel
    policies: Any = importlib.import_module("vllm.distributed.eplb.policy")
    stock = policies.EPLB_POLICIES["default"]
    plugins: Any = importlib.import_module("vllm.plugins")
    plugins.load_general_plugins()
    plugins.plugins_loaded = False
    plugins.load_general_plugins()  # as in a process that loads them twice
    policy = policies.EPLB_POLICIES["default"]
    weight = torch.arange(num_layers * num_experts, dtype=torch.int64).reshape(num_layers, num_experts)
    old = (torch.arange(num_slots) % num_experts).repeat(num_layers, 1)
    rows = policy.rebalance_experts(weight, num_slots, 1, 1, num_ranks, old)
    own = stock.rebalance_experts(weight, num_slots, 1, 1, num_ranks, old)
    print(
        json.dumps(
            {
                "rows": rows.tolist(),
                "stock": own.tolist(),
                "replaced": policy is not stock,
                "is_policy": issubclass(policy, policies.AbstractEplbPolicy) and not policy.__abstractmethods__,
                "like_stock": [rows.dtype == own.dtype, rows.device == own.device, rows.is_contiguous()],
            }
        )
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
