"""A vLLM plugin, copied beside a plan's rows: vLLM's balancing policy then returns them for the model they are of.

Needs vLLM's environment only, nothing of moeplan. Lies with `expert_map.json` (a row of expert ids for every MoE layer)
and `moeplan.json` in a folder on PYTHONPATH; vLLM calls `register` in every process that it starts.
"""

import json
import logging
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

TESTED = "0.33.0"
POLICY = "default"  # the only one that vLLM's configuration admits

logger = logging.getLogger("vllm.moeplan")  # below vLLM's own, whose handlers print it
answered: set[tuple[int, ...]] = set()


def register() -> None:
    """Put a policy that returns the plan's rows in the place of vLLM's own; a second call changes nothing."""
    policies = import_module("vllm.distributed.eplb.policy").EPLB_POLICIES
    stock = policies[POLICY]
    if getattr(stock, "moeplan", False):
        return
    if version("vllm").split("+")[0] != TESTED:  # without what says which CUDA it was built for
        logger.warning("moeplan: tried with vLLM %s, and this is %s", TESTED, version("vllm"))
    folder = Path(__file__).parent
    rows = torch.tensor(json.loads((folder / "expert_map.json").read_text()), dtype=torch.int64)
    num_ranks = json.loads((folder / "moeplan.json").read_text())["num_devices"]
    policies[POLICY] = planned(stock, rows, num_ranks)
    logger.info("moeplan: placement of %d layers with %d slots on %d ranks is ready", *rows.shape, num_ranks)


def planned(stock: Any, rows: torch.Tensor, num_ranks: int) -> Any:
    """The policy that answers with `rows` `[L, P]` where the question is of their model, as `stock` does elsewhere."""
    num_layers, num_slots = rows.shape
    mine = (num_layers, int(rows.max()) + 1, num_slots, num_ranks)

    def rebalance_experts(
        weight: torch.Tensor, num_replicas: int, num_groups: int, num_nodes: int, num_ranks: int, *old: Any
    ) -> Any:
        """Rows of the plan, or the stock policy's where another model is asked about."""
        asked = (*weight.shape, num_replicas, num_ranks)
        if asked == mine:
            _tell(asked, logging.INFO, "moeplan: placement of the plan for layers, experts, slots, ranks %s", asked)
            return rows.clone()
        _tell(asked, logging.WARNING, "moeplan: no plan for layers, experts, slots, ranks %s, only %s", asked, mine)
        return stock.rebalance_experts(weight, num_replicas, num_groups, num_nodes, num_ranks, *old)

    return type("PlannedPolicy", (stock,), {"rebalance_experts": staticmethod(rebalance_experts), "moeplan": True})


def _tell(asked: tuple[int, ...], level: int, *message: Any) -> None:
    """Log the answer to each question once."""
    if asked not in answered:
        answered.add(asked)
        logger.log(level, *message)
