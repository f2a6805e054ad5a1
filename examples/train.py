"""Training with spread experts: a plain PyTorch loop, in which three lines are moeplan's.

In a folder with an active plan for 4 devices (moeplan apply plan.json), or with --plan plan.json:

    torchrun --nproc-per-node 4 train.py

The model is the small one that comes with moeplan, the text Python's own documentation.
"""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from moeplan.planner.demo.model import load_embedded
from moeplan.planner.demo.text import samples, training_text
from moeplan.runtime import clip_grad_norm_, full_state_dict, load_plan, parallelize
from moeplan.traces import record


def main() -> None:
    """Train the embedded model a little further, and save the whole of it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--plan", help="by default the active plan")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=8, help="samples per step, of all ranks together")
    parser.add_argument("--replica-memory", choices=("resident", "shared"), default="resident")
    parser.add_argument("--record", help="where a trace of this training goes, to plan the next one by")
    parser.add_argument("-o", dest="output", help="where to save the trained weights")
    options = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)

    plan = load_plan(options.plan)
    dispatch = "standard" if plan.dispatch_model == "coherent" else None  # which is for inference
    model = load_embedded().to(device).train()
    model = parallelize(model, plan, dispatch=dispatch, replica_memory=options.replica_memory)  # moeplan's first line
    loop = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(loop.parameters(), lr=1e-4)

    text = torch.from_numpy(samples(training_text(), 129))
    shuffled = torch.randperm(len(text), generator=torch.Generator().manual_seed(0))
    recording = record(loop, options.record, spec=plan.model) if options.record else contextlib.nullcontext()
    with recording:
        for step, batch in enumerate(shuffled.split(options.batch)[: options.steps]):
            mine = text[batch.tensor_split(dist.get_world_size())[dist.get_rank()]].to(device)
            logits = loop(mine[:, :-1])
            labels = model.follow(mine[:, 1:])  # moeplan's second line: under NetMoE, samples change ranks
            loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
            loss.backward()
            clip_grad_norm_(loop, 1.0)  # moeplan's third line, in place of torch.nn.utils.clip_grad_norm_
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(mean := loss.detach() / dist.get_world_size())
            if dist.get_rank() == 0:
                print(f"step {step}  loss {mean:.6f}", flush=True)

    resident = sum(block.weights.replica_bytes for block in model.blocks)
    if resident and dist.get_rank() == 0:
        saved = resident - model.replica_bytes
        print(f"replicas take {model.replica_bytes / 1e6:.2f} MB here, {saved / 1e6:.2f} less than resident ones")
    if model.rebalancing is not None and dist.get_rank() == 0:
        print(f"{len(model.rebalancing.changes)} changes of placements that follow the load")
    whole = full_state_dict(loop)  # on rank 0; every rank takes part
    if options.output and whole:
        torch.save(whole, options.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
