"""A callback by which Hugging Face's Trainer carries a plan out: `Trainer(model, args, callbacks=[PlanCallback()])`."""

import base64
import io
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from ..errors import UsageError
from ..files import atomic_path
from .active import load_plan
from .gradients import clip_grad_norm_
from .parallel import ReplicaMemory, parallelize
from .plan import Plan
from .rebalancing import Schedule
from .whole import full_optimizer_state, full_state_dict, keep_held

if TYPE_CHECKING:
    from .expert_parallel import ExpertParallelModel


class PlanCallback(TrainerCallback, ExportableState):
    """Spreads the experts of the Trainer's model, clips by the norm over all ranks, and saves the whole model.

    Checkpoints hold the whole model and the whole state of its optimizer under the names that both had, so that
    training resumes from them under another plan, or under none; replicas that follow the load go on under the same
    plan, from what `trainer_state.json` keeps. What `trainer.save_model()` writes after training has the names of the
    hub.

    Parameters
    ----------
    plan
        By default the one that `load_plan` finds; carried out with standard dispatch.
    schedule, moves_per_step, replica_memory
        As `parallelize` takes them.
    """

    model: "ExpertParallelModel"  #: What `parallelize` made of the Trainer's model

    def __init__(
        self,
        plan: Plan | None = None,
        *,
        schedule: Schedule | None = None,
        moves_per_step: int | None = None,
        replica_memory: ReplicaMemory = "resident",
    ) -> None:
        self.plan = plan
        self._options: dict[str, Any] = {
            "schedule": schedule,
            "moves_per_step": moves_per_step,
            "replica_memory": replica_memory,
        }
        self._max_norm, self._norm, self._ended = math.inf, torch.zeros(()), False
        self._whole: dict[str, Tensor] | None = None

    def on_init_end(self, args: TrainingArguments, *_unused: Any, **kwargs: Any) -> None:
        """Spread the experts, before the optimizer is made and the model wrapped.

        Raises
        ------
        UsageError
            The Trainer is to shard the model itself, or the plan asks for another dispatch, or condenses by a schedule.
        """
        plan = self.plan or load_plan()
        if args.fsdp or args.deepspeed:
            raise UsageError("a plan beside the Trainer's own fsdp or deepspeed; without them it uses DDP")
        if args.fp16:
            raise UsageError("fp16 under the Trainer, whose scaler would skip a step on one rank alone; take bf16")
        if plan.dispatch_model != "standard":
            raise UsageError(
                f"dispatch model {plan.dispatch_model!r} under the Trainer, which carries out standard dispatch only;"
                " solve for that, or write the loop yourself"
            )
        condensation = plan.decisions.condensation
        if condensation is not None and condensation.schedule != "fixed":
            raise UsageError(
                f"condensation by schedule {condensation.schedule} under the Trainer, which tells no plan each step's"
                " loss; solve without --condense-schedule, or write the loop yourself"
            )
        self.model = parallelize(kwargs["model"], plan, **self._options)
        self._max_norm, args.max_grad_norm = args.max_grad_norm or math.inf, 0.0  # the Trainer's is of one rank
        self.model.model.save_pretrained = self._save_pretrained  # type: ignore[assignment]

    def on_train_begin(self, *event: Any, **kwargs: Any) -> None:
        """Keep this rank's part of the optimizer's state where training resumes."""
        self._ended, self._whole = False, None
        state: TrainerState = event[1]
        if state.global_step > 0:
            keep_held(self.model, kwargs["optimizer"])
            states: Any = state.stateful_callbacks or {}
            kept = states.get(type(self).__name__, {}).get("attributes", {})
            if self.model.rebalancing is not None and kept.get("plan") == self.model.plan.plan_sha256:
                rebalancing = torch.load(io.BytesIO(base64.b64decode(kept["rebalancing"])), weights_only=True)
                optimizer = kwargs["optimizer"]  # accelerate's, around the one that it stands for
                self.model.rebalancing.load_state_dict(rebalancing, getattr(optimizer, "optimizer", optimizer))

    def state(self) -> dict[str, Any]:
        """State that the Trainer keeps of replicas that follow the load."""
        model = getattr(self, "model", None)
        if model is None or model.rebalancing is None:
            return {"args": {}, "attributes": {}}
        torch.save(model.rebalancing.state_dict(), stream := io.BytesIO())
        kept = {"plan": model.plan.plan_sha256, "rebalancing": base64.b64encode(stream.getvalue()).decode()}
        return {"args": {}, "attributes": kept}

    def on_pre_optimizer_step(self, *_unused: Any, **_kwargs: Any) -> None:
        """Clip the gradients."""
        self._norm = clip_grad_norm_(self.model, self._max_norm)

    def on_log(self, *event: Any, **kwargs: Any) -> None:
        """Log the norm over all ranks in place of this rank's."""
        state: TrainerState = event[1]
        for written in (kwargs["logs"], state.log_history[-1]):
            if "grad_norm" in written:
                written["grad_norm"] = self._norm.item()

    def on_step_end(self, *event: Any, **_kwargs: Any) -> None:
        """Gather the model for rank 0, which saves it next."""
        args, _, control = event
        if control.should_save or (control.should_evaluate and args.save_strategy == "best"):
            self._whole = full_state_dict(self.model)

    def on_epoch_end(self, *event: Any, **_kwargs: Any) -> None:
        """Gather the model at the end of an epoch, as after a step."""
        self.on_step_end(*event)

    def on_save(self, args: TrainingArguments, state: TrainerState, *_unused: Any, **kwargs: Any) -> None:
        """Write the whole state of the optimizer over rank 0's own."""
        self._whole = None
        if args.save_only_model:
            return
        whole = full_optimizer_state(self.model, kwargs["optimizer"])
        if dist.get_rank() == 0:
            folder = Path(args.output_dir or "", f"checkpoint-{state.global_step}")
            with atomic_path(folder / "optimizer.pt") as temporary:
                torch.save(whole, temporary)

    def on_train_end(self, *_unused: Any, **_kwargs: Any) -> None:
        """Gather the model for `trainer.save_model()`."""
        self._ended, self._whole = True, full_state_dict(self.model)

    def _save_pretrained(self, folder: str | os.PathLike[str], **options: Any) -> None:
        """Save the gathered model as the model's `save_pretrained` would."""
        if self._whole is None:
            raise UsageError("a spread model is whole on rank 0 when the Trainer saves, and after training, only")
        model: Any = self.model.model
        # The Trainer resumes from the names that the model has, not from the hub's.
        options = {"save_original_format": self._ended, **options, "state_dict": dict(self._whole)}
        type(model).save_pretrained(model, folder, **options)
