"""What the naive twin of a migrating forward knows: one process, sample by sample, and copies counted one by one."""

import functools
import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment

from moeplan.planner.demo.model import MoELanguageModel, Router
from tests.runtime.migrating.migrating_cases import EXPERTS, VOCABULARY, Answer, Case, loss_of


@dataclass(frozen=True)
class Reference:
    """The single process: logits `[I, S, V]`, each sample's experts by layer `[L][S, K]`, gradients."""

    logits: np.ndarray
    ids: list[list[np.ndarray]]
    gradients: dict[str, np.ndarray]


@dataclass
class Watched:
    """A model whose routers tell what they chose, and how near the next gate was to the last that was chosen."""

    model: MoELanguageModel
    ids: list[np.ndarray]
    gap: float = float("inf")

    @classmethod
    def of(cls, case: Case) -> "Watched":
        watched = cls(case.model(), [])
        for name, module in watched.model.named_modules():
            if name.endswith("moe.router"):
                module.register_forward_hook(watched.see)
        return watched

    def see(self, router: Router, inputs: tuple[torch.Tensor], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.ids.append(output[1].numpy())
        gates = router.gate(inputs[0]).detach().sort(descending=True).values
        if gates.shape[0]:
            self.gap = min(
                self.gap, float((gates[:, : output[1].shape[1]] - gates[:, 1 : output[1].shape[1] + 1]).min())
            )


@functools.cache
def reference(case: Case) -> Reference:
    watched, logits, ids = Watched.of(case), [], []
    torch.manual_seed(case.seed)
    drawn = int(torch.randint(2**62, ()))
    for sample, tokens, mask in zip(case.samples().tolist(), case.tokens(), case.mask(), strict=True):
        watched.ids = []
        whole = torch.zeros(case.length, VOCABULARY, dtype=torch.float64)
        whole[mask] = alone(watched.model, tokens[mask], case.window, f"{drawn}:{sample}")
        logits.append(whole)
        ids.append(watched.ids)
    assert watched.gap > 1e-6
    found = torch.stack([*logits, torch.zeros(case.length, VOCABULARY, dtype=torch.float64)])[:-1]
    if found.requires_grad:
        torch.autograd.backward((found * case.upstream()).sum())
    gradients = {
        name: np.zeros(p.shape) if p.grad is None else p.grad.numpy() for name, p in watched.model.named_parameters()
    }
    return Reference(found.detach().numpy(), ids, gradients)


def trained(case: Case, share: float = 1.0) -> list[float]:
    """The losses of training in one process, sample by sample, by `share` of the gradients."""
    watched, losses = Watched.of(case), []
    optimizer = torch.optim.AdamW(watched.model.parameters(), lr=3e-3)
    for step in range(case.steps):
        optimizer.zero_grad()
        tokens, mask = case.tokens(step), case.mask()
        parts = [alone(watched.model, one[real]) for one, real in zip(tokens, mask, strict=True)]
        logits = torch.zeros(*tokens.shape, VOCABULARY, dtype=torch.float64)
        logits[mask] = torch.cat(parts)
        loss = loss_of(logits, tokens, mask)
        torch.autograd.backward(share * loss)
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


def in_order(case: Case, found: list[Answer]) -> tuple[np.ndarray, np.ndarray]:
    """Which samples ended where, and their rows in the order of the samples."""
    samples = np.concatenate([answer.samples for answer in found])
    order = np.argsort(samples)
    assert np.array_equal(samples[order], case.samples().numpy())
    return np.repeat(np.arange(len(found)), [len(answer.samples) for answer in found])[order], order


def homes(case: Case, found: list[Answer]) -> list[np.ndarray]:
    """Where samples are at each layer, -1 those without tokens, and at the end."""
    by_layer = []
    for layer in range(case.num_routed):
        home = np.full(sum(case.batches), -1)
        for rank, answer in enumerate(found):
            home[np.isin(case.samples().numpy(), answer.routed[layer][0])] = rank
        by_layer.append(home)
    return [*by_layer, in_order(case, found)[0]]


def devices_of(case: Case, layer: int, sample: int, home: int) -> list[set[int]]:
    """The devices that each token of a sample visits, by the replica rule in words."""
    placement, group, found = case.placement(), len(case.slots) // case.nodes, []
    slots = list(zip(placement.device_of_slot.tolist(), placement.physical_to_logical[layer].tolist(), strict=True))
    for position, experts in enumerate(reference(case).ids[sample][layer].tolist()):
        visited = set()
        for expert in experts:
            offered = sorted(device for device, held in slots if held == expert)
            if case.rule == "nearest":
                near = [device for device in offered if device // group == home // group]
                offered = [home] if home in offered else near or offered
            visited.add(offered[(int(case.samples()[sample]) + position) % len(offered)])
        found.append(visited)
    return found


def counts(case: Case, layer: int, home: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Copies of each sample to every device, and pairs with every expert, counted one by one."""
    copies, pairs = np.zeros((len(home), len(case.slots)), np.int64), np.zeros((len(home), EXPERTS), np.int64)
    for sample, here in enumerate(home.tolist()):
        for visited in devices_of(case, layer, sample, here):
            copies[sample, list(visited)] += 1
        for experts in reference(case).ids[sample][layer].tolist():
            pairs[sample, experts] += 1
    return copies, pairs


def least(cost: np.ndarray, capacity: int) -> float:
    """The least sum over all assignments, at most `capacity` rows a column."""
    repeated = np.repeat(cost, capacity, axis=1)
    return float(repeated[linear_sum_assignment(repeated)].sum())


def starts(case: Case) -> np.ndarray:
    return np.repeat(np.arange(len(case.batches)), case.batches)
