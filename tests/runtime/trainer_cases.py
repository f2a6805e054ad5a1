"""A training with Hugging Face's Trainer, with or without a plan; what it logs is written beside its checkpoints.

Arguments: the steps, and those between two checkpoints; the folder; the plan and the checkpoint to resume from, or
"none"; what the callback is given beside the plan, as JSON. It is rank 0 of as many as `WORLD_SIZE` says, and forks the
others.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

from moeplan.runtime import load_plan
from moeplan.runtime.trainer import PlanCallback

BATCH = 8


def model() -> MixtralForCausalLM:
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = MixtralConfig(**sizes, num_local_experts=8, num_experts_per_tok=2)
    config._experts_implementation = "eager"  # the grouped product takes no float64
    torch.manual_seed(0)
    return MixtralForCausalLM(config).double()


def main() -> None:
    """Be the ranks of one training."""
    others = list[int]()
    for rank in range(1, int(os.environ.get("WORLD_SIZE", "1"))):
        if not (pid := os.fork()):
            os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
            others.clear()
            break
        others.append(pid)
    train(*sys.argv[1:])
    assert not any(os.waitpid(pid, 0)[1] for pid in others)


def train(steps: str, saved_at: str, folder: str, plan: str, checkpoint: str, options: str) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(64, (int(steps) * BATCH, 12), generator=generator)
    arguments = TrainingArguments(
        folder,
        max_steps=int(steps),
        per_device_train_batch_size=BATCH if plan == "none" else BATCH // 2,
        use_cpu=True,
        ddp_backend=None if plan == "none" else "gloo",
        learning_rate=1e-3,
        max_grad_norm=0.5,
        logging_steps=1,
        save_steps=int(saved_at),
        report_to=[],
        disable_tqdm=True,
    )
    callbacks = [] if plan == "none" else [PlanCallback(load_plan(plan), **json.loads(options))]
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(model(), arguments, train_dataset=data, callbacks=[*callbacks])
    trainer.train(resume_from_checkpoint=None if checkpoint == "none" else checkpoint)
    trainer.save_model(f"{folder}/final")
    if arguments.process_index == 0:
        logged = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
        Path(folder, "logged.json").write_text(json.dumps(logged))
        done = [one.model.rebalancing.changes for one in callbacks if one.model.rebalancing is not None]
        Path(folder, "changes.json").write_text(json.dumps(done))
        Path(folder, "replicas.json").write_text(json.dumps([one.model.replica_bytes for one in callbacks]))
