"""A script with Hugging Face's Trainer, with or without a plan; what it logs is written beside its checkpoints.

Arguments: the steps, and those between two checkpoints; the folder; the plan and the checkpoint to resume from, or
"none".
"""

import json
import sys
from pathlib import Path

import torch
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainerCallback, TrainingArguments

from moeplan.runtime import load_plan
from moeplan.runtime.trainer import PlanCallback

BATCH = 8


def model() -> MixtralForCausalLM:
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    )
    config._experts_implementation = "eager"  # the grouped product takes no float64
    torch.manual_seed(0)
    return MixtralForCausalLM(config).double()


def main(steps: str, saved_at: str, folder: str, plan: str, checkpoint: str) -> None:
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
    callbacks: list[TrainerCallback] = [] if plan == "none" else [PlanCallback(load_plan(plan))]
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(model(), arguments, train_dataset=data, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=None if checkpoint == "none" else checkpoint)
    trainer.save_model(f"{folder}/final")
    if arguments.process_index == 0:
        logged = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
        Path(folder, "logged.json").write_text(json.dumps(logged))


if __name__ == "__main__":
    main(*sys.argv[1:])
