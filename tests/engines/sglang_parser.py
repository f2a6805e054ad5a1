"""Read an expert location with SGLang's own parser, as some of its ranks do; prints JSON.

FILE RANKS NODES LAYERS EXPERTS REDUNDANT ASKED. A plain `import sglang` needs kernels; the packages are registered
bare, and what a running server would have set is put in their places.
"""

import importlib
import json
import sys
import types
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def bare(name: str, folder: Path) -> None:
    """A package of that name whose modules are found in `folder`, without its own code having run."""
    module = types.ModuleType(name)
    module.__path__ = [str(folder)]
    sys.modules[name] = module


def main(file: str, ranks: int, nodes: int, layers: int, experts: int, redundant: int, asked: int) -> None:
    """The map that SGLang makes of `file`, and the slot that each of the first `asked` ranks sends an expert's to."""
    found = find_spec("sglang")
    assert found is not None
    assert found.origin is not None
    folder = Path(found.origin).parent
    bare("sglang", folder)
    bare("sglang.srt", folder / "srt")
    location: Any = importlib.import_module("sglang.srt.eplb.expert_location")
    moe = SimpleNamespace(
        init_expert_location=file,
        ep_num_redundant_experts=redundant,
        ep_dispatch_algorithm="static",
        moe_a2a_backend="deepep",
        ep_join_mode=None,
    )
    parallel = SimpleNamespace(ep_size=ranks, nnodes=nodes, elastic_ep_initial_size=None, tp_size=ranks)
    location.get_exec = lambda: SimpleNamespace(moe=moe)
    location.get_parallel = lambda: parallel
    location.get_device = lambda: SimpleNamespace(device="cpu")
    location._prefer_same_node_experts = lambda: True
    model = location.ModelConfigForExpertLocation(num_layers=layers, num_logical_experts=experts)
    location.ModelConfigForExpertLocation.from_model_config = staticmethod(lambda _: model)
    read = [location.compute_initial_expert_location_metadata(None, rank) for rank in range(asked)]
    dispatch = [one.logical_to_rank_dispatch_physical_map.tolist() for one in read]
    print(json.dumps({"map": read[0].physical_to_logical_map.tolist(), "ranks": read[0].ep_size, "dispatch": dispatch}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
