"""What a single process generates, and what its journeys take: the oracles of generating test worlds."""

import functools
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import torch

from moeplan.runtime.engine.traffic import Traffic
from tests.runtime.coherent.generation_cases import Job
from tests.runtime.test_parallel import device_of
from tests.runtime.worlds import Watched

NO_TIE = 1e-6


@dataclass(frozen=True)
class Reference:
    """By sample: new tokens, the logits of the prompt, and the experts of all tokens that were taken, `[T, L, K]`."""

    tokens: list[list[int]]
    logits: list[np.ndarray]
    ids: list[np.ndarray]


def reference(job: Job) -> Reference:
    """Without a cache: every token from a forward of all before it, and no near ties."""
    return _reference(replace(job, dispatch="standard"))


@functools.cache
def _reference(job: Job) -> Reference:
    model = job.model()
    watched = Watched(model)
    tokens, logits, ids = [], [], []
    for prompt in job.tokens():
        text, new = prompt, list[int]()
        while len(new) < job.new and job.eos not in new:
            watched.ids = []
            with torch.no_grad():
                logits_SV = getattr(model(text[None]), "logits", None)
                logits_SV = (model(text[None]) if logits_SV is None else logits_SV)[0]
            logits += [logits_SV.numpy()] if not new else []
            best, second = logits_SV[-1].topk(2).values
            assert best - second > NO_TIE
            new.append(int(logits_SV[-1].argmax()))
            text = torch.cat([text, torch.tensor(new[-1:])])
        tokens.append(new)
        ids.append(torch.stack(watched.ids[-job.case().num_layers :], dim=1).numpy())
    return Reference(tokens, logits, ids)


def recount(job: Job) -> list[Traffic]:
    """What each rank sends, receives and computes, token by token with sets."""
    case, size = job.case(), len(job.slots)
    routed = [0, None, 1] if job.family == "qwen3_moe" else [0, 1, 2]
    dispatched, combined, returned, told = (Counter[int]() for _ in range(4))
    rows, loads = Counter[tuple[int, int]](), Counter[tuple[int, int]]()  # by step (prompts: -1), and rank
    coherent, expected = job.dispatch == "coherent", reference(job)
    for sample, (source, length) in enumerate(zip(job.source, job.lengths, strict=True)):
        home = source
        for position, ids in enumerate(expected.ids[sample]):
            step = max(-1, position - length)
            home = source if step < 0 else home
            for ordinal in routed:
                rows[step, home] += 1
                if ordinal is None:
                    continue
                turn = int(job.samples()[sample]) + position
                devices = [device_of(case, ordinal, int(e), home, turn) for e in ids[ordinal]]
                new = devices[0] if coherent else home
                dispatched[home] += len(set(devices) - {home})
                combined.update(set(devices) - {new})
                loads.update((device, ordinal) for device in devices)
                home = new
            returned[home] += coherent and position >= length - 1 and home != source
    gathered = [step for step in {step for step, _ in rows} if step < max(0, job.new - 2)] if coherent else []
    itemsize = 8
    header = (job.top_k + 2 * coherent) * 4 + job.top_k * (4 if job.family == "mixtral" else itemsize)  # its gates
    for rank in range(size):
        told[rank] = sum(rows[step, rank] for step in gathered)
    return [
        Traffic(
            copies=dispatched[rank] + combined[rank],
            payload_bytes=(dispatched[rank] + combined[rank]) * job.hidden_size * itemsize,
            ids_bytes=dispatched[rank] * header + 4 * coherent * combined[rank] + 4 * (size - 1) * told[rank],
            kv_bytes=(sum(told.values()) - told[rank]) * kv_bytes(job),
            return_bytes=12 * returned[rank],
            loads=tuple(loads[rank, layer] for layer in range(case.num_layers)),
        )
        for rank in range(size)
    ]


def kv_bytes(job: Job) -> int:
    """Of a token in a layer."""
    heads, width = {"embedded": (2, 4), "olmoe": (2, 8)}.get(job.family, (2, 16))
    return 2 * heads * width * 8
