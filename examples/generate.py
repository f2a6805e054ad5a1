"""Generation with spread experts: each rank continues prompts of its own.

In a folder with an active plan for 4 devices (moeplan apply plan.json), or with --plan plan.json:

    torchrun --nproc-per-node 4 generate.py

The model is the small one that comes with moeplan; a token is a byte.
"""

import argparse
import os

import torch
import torch.distributed as dist

from moeplan.planner.demo.model import load_embedded
from moeplan.runtime import load_plan, parallelize

PROMPTS = (
    "The import statement",
    "A class definition",
    "Exceptions are",
    "The global statement",
    "Lists are mutable",
    "A function call",
    "Dictionaries may",
    "The with statement",
)


def main() -> None:
    """Continue a few prompts, and say what crossed devices."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--plan", help="by default the active plan")
    parser.add_argument("--tokens", type=int, default=64, help="bytes to generate for each prompt")
    options = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)

    plan = load_plan(options.plan)
    dispatch = "standard" if plan.dispatch_model == "migrating" else None  # which is for training
    model = parallelize(load_embedded().to(device), plan, dispatch=dispatch)

    rank, size = dist.get_rank(), dist.get_world_size()
    mine = [torch.tensor(list(prompt.encode())) for prompt in PROMPTS[rank::size]]
    found = model.generate(mine, options.tokens)

    texts: list[list[bytes]] = [[] for _ in range(size)]
    dist.all_gather_object(texts, [bytes(tokens.tolist()) for tokens in found])
    if rank == 0:
        for number, prompt in enumerate(PROMPTS):
            print(repr(prompt + texts[number % size][number // size].decode(errors="replace")))
        print(f"rank 0 sent {model.traffic.copies} copies and held {model.cache_bytes} bytes of keys and values")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
