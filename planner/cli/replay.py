"""`moeplan replay`: plans run for real, on ranks, with recorded routing."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from ...errors import NoBenefitError
from .flags import Json, optional
from .screen import console, print_json, progress

MOST_ROUNDS = 100_000


def replay(
    plans: Annotated[list[Path], typer.Argument(help="The plans.")],
    trace: Annotated[str, typer.Option(help="A trace of their model, of tokens.")] = "traces",
    profile: Annotated[Path | None, optional("The profile that predicts; else profile.json, if there.")] = None,
    tokens_per_step: Annotated[
        int | None, optional("Tokens of a step that was not recorded; 256 per device.", min=1)
    ] = None,
    backward: Annotated[bool, typer.Option("--backward", help="Run forward and backward.")] = False,
    rounds: Annotated[
        int,
        typer.Option(
            help="Runs of today and all plans, forth and back; at most as many steps.", min=1, max=MOST_ROUNDS
        ),
    ] = 10,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="What computes.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of the weights.", min=0, max=2**62)] = 0,
    save: Annotated[bool, typer.Option("--save", help="Keep figures beside each plan, for show and report.")] = False,
    as_json: Json = False,
) -> None:
    """Run the MoE layers of a model, with random weights, as today and under plans; measured beside predicted.

    A rank for every device of the plans' cluster: processes of this machine, or those that torchrun or srun started.
    They send a step of recorded tokens to the recorded experts; recorded steps, as those of a training run, follow one
    another. Attention is left out. Exit code 8: no plan is faster than today by more than the noise.

    \b
    Examples:
      moeplan replay plan.json --trace traces --save
      torchrun --nproc-per-node 8 -m moeplan.planner.cli replay plan.json
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # below, a lost rank prints a page of C++ frames
    from ..replay.job import Experiment
    from ..replay.job import replay as run
    from ..replay.report import replay_report
    from ..report.next_step import after_replay
    from ..request import profile_for

    asked = Experiment(
        plans=plans,
        trace=trace,
        profile=profile_for(profile),
        tokens=tokens_per_step,
        backward=backward,
        rounds=rounds,
        seed=seed,
    )
    with progress() as say:
        measured = run(asked, device=device, will_keep=save, on_progress=say)
    if measured is None:  # not rank 0 of a launched world
        return
    done = measured.replayed
    if as_json:
        print_json(asdict(done))
    else:
        replay_report(done, console())
    if save:  # once it is seen: a disk may be full
        files = measured.save()
        if not as_json:
            print(f"wrote     {', '.join(map(str, files))}")
    if not as_json:
        more = 2 * rounds if len(done.steps) == rounds <= MOST_ROUNDS // 2 else None
        print(f"next: {after_replay(done, measured.plans, more_rounds=more)}")
    if not done.gaining:
        raise NoBenefitError(f"no gain above the noise of {done.noise:.1%}")
