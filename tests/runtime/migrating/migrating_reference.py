"""What the naive twin of a migrating forward knows: one process, sample by sample, and copies counted one by one."""

import functools
import hashlib
from dataclasses import dataclass

import numpy as np
import torch

from moeplan.planner.demo.model import MoELanguageModel
from moeplan.solvers.luffy import Attention, first_homes
from tests.runtime.migrating.migrating_cases import EXPERTS, VOCABULARY, Moved, Moving, loss_of
from tests.runtime.test_parallel import device_of
from tests.runtime.worlds import Watched


@dataclass(frozen=True)
class Reference:
    """The single process: logits `[I, S, V]`, each sample's experts by layer `[L][S, K]`, gradients."""

    logits: np.ndarray
    ids: list[list[np.ndarray]]
    gradients: dict[str, np.ndarray]


@functools.cache
def reference(case: Moving) -> Reference:
    model, logits, ids = case.model(), [], []
    watched = Watched(model)
    torch.manual_seed(case.seed)
    drawn = int(torch.randint(2**62, ()))
    for sample, tokens, mask in zip(case.samples().tolist(), case.tokens(), case.mask(), strict=True):
        watched.ids = []
        whole = torch.zeros(case.length, VOCABULARY, dtype=torch.float64)
        whole[mask] = alone(model, tokens[mask], case.window, f"{drawn}:{sample}")
        logits.append(whole)
        ids.append([chosen.numpy() for chosen in watched.ids])
    assert watched.gap > 1e-6
    together = torch.stack([*logits, torch.zeros(case.length, VOCABULARY, dtype=torch.float64)])[:-1]
    if together.requires_grad:
        torch.autograd.backward((together * case.upstream()).sum())
    gradients = {name: np.zeros(p.shape) if p.grad is None else p.grad.numpy() for name, p in model.named_parameters()}
    return Reference(together.detach().numpy(), ids, gradients)


def trained(case: Moving, *, weighed: bool = False) -> list[float]:
    """The losses of training in one process, sample by sample, over the number of ranks; `weighed`: of tokens."""
    model, losses = case.model(), []
    watched, optimizer = Watched(model), torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(case.steps):
        optimizer.zero_grad()
        tokens, mask = case.tokens(step), case.mask()
        logits = torch.zeros(*tokens.shape, VOCABULARY, dtype=torch.float64)
        logits[mask] = torch.cat([alone(model, sample[real]) for sample, real in zip(tokens, mask, strict=True)])
        loss = loss_of(logits, tokens, mask) / (int(mask.sum()) if weighed else len(case.slots))
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert watched.gap > 1e-7
    return losses


def alone(model: MoELanguageModel, tokens_S: torch.Tensor, window: int | None = None, drawn: str = "") -> torch.Tensor:
    """The logits of one sample without padding; what it draws depends on the words and the layer."""
    seed = int.from_bytes(hashlib.sha256(drawn.encode()).digest()[:7], "big")
    position = torch.arange(len(tokens_S))
    back = position[:, None] - position
    mask = (back >= 0) & (back < (window or len(tokens_S)))
    x = model.embed(tokens_S)
    for depth, layer in enumerate(model.layers):
        torch.manual_seed(seed + depth)
        x = layer(x, position, mask)
    logits: torch.Tensor = model.head(model.norm(x))
    return logits


def in_order(case: Moving, ranks: list[Moved]) -> tuple[np.ndarray, np.ndarray]:
    """Which samples ended where, and their rows in the order of the samples."""
    samples = np.concatenate([answer.samples for answer in ranks])
    order = np.argsort(samples)
    assert np.array_equal(samples[order], case.samples().numpy())
    return np.repeat(np.arange(len(ranks)), [len(answer.samples) for answer in ranks])[order], order


def homes(case: Moving, ranks: list[Moved]) -> list[np.ndarray]:
    """Where samples are at each layer, -1 those without tokens, and at the end."""
    by_layer = []
    for layer in range(case.num_routed):
        home = np.full(sum(case.batches), -1)
        for rank, answer in enumerate(ranks):
            home[np.isin(case.samples().numpy(), answer.routed[layer][0])] = rank
        by_layer.append(home)
    return [*by_layer, in_order(case, ranks)[0]]


def devices_of(case: Moving, layer: int, sample: int, home: int) -> list[set[int]]:
    """The devices that each token of a sample visits."""
    return [
        {device_of(case, layer, expert, home, int(case.samples()[sample]) + position) for expert in experts}
        for position, experts in enumerate(reference(case).ids[sample][layer].tolist())
    ]


def counts(case: Moving, layer: int, home: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Copies of each sample to every device, and pairs with every expert, counted one by one."""
    copies, pairs = np.zeros((len(home), len(case.slots)), np.int64), np.zeros((len(home), EXPERTS), np.int64)
    for sample, here in enumerate(home.tolist()):
        for visited in devices_of(case, layer, sample, here):
            copies[sample, list(visited)] += 1
        for experts in reference(case).ids[sample][layer].tolist():
            pairs[sample, experts] += 1
    return copies, pairs


def given(case: Moving) -> np.ndarray:
    """The rank that each sample is given to."""
    return np.repeat(np.arange(len(case.batches)), case.batches)


def starts(case: Moving) -> np.ndarray:
    """The rank that each sample is on before the first layer; where attention counts, the one with least of it yet."""
    if case.law is None or case.method == "paper":
        return given(case)
    tokens = case.mask().sum(dim=1).numpy()
    return first_homes(case.method, Attention(case.law, tokens, tokens**2), given(case), len(case.slots))
