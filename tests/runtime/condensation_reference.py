"""Condensation in one process, row by row, in float64: an emulation that shares no code with the runtime.

Legend: T tokens; K experts per token; M hidden size; E experts; L layers; D devices.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from moeplan.planner.demo.model import MoEBlock, MoELanguageModel
from tests.builders import known
from tests.runtime.rank_cases import Case


@dataclass
class Seen:
    """Rows of the last forward of a layer that would go, and went, to other devices, by rank."""

    rows: list[int]
    sent: list[int]


class CondensedExperts(nn.Module):
    """The experts of a layer over the tokens of all ranks, rank by rank, of which some rows stand for others.

    Rows for other devices arrive, and return, as they are when `travelled`; `apart`: a row for each expert.
    """

    def __init__(
        self,
        experts: nn.Module,
        held_ED: np.ndarray,
        ranks: Sequence[range],
        turn_T: np.ndarray,
        *,
        medoid: bool = False,
        cosine: bool = False,
        gain_E: Sequence[float] | None = None,
        travelled: Callable[[Tensor], Tensor] | None = None,
        apart: bool = False,
    ) -> None:
        super().__init__()
        assert isinstance(experts.w_in, nn.Parameter)
        assert isinstance(experts.w_out, nn.Parameter)
        self.w_in, self.w_out = experts.w_in, experts.w_out
        self.held_ED, self.ranks, self.turn_T = held_ED, ranks, turn_T
        self.medoid, self.cosine, self.gain_E = medoid, cosine, gain_E
        self.travelled, self.apart = travelled, apart
        self.reach: float | None = None

    def forward(self, x_TM: Tensor, ids_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """The weighted sum of each token's experts."""
        self.seen = Seen([0] * len(self.ranks), [0] * len(self.ranks))
        y = [torch.zeros_like(x_TM[0]) for _ in x_TM]
        for rank, tokens in enumerate(self.ranks):
            groups = defaultdict[tuple[int, tuple[int, ...]], dict[int, dict[int, Tensor]]](dict)
            for t in tokens:
                asked = defaultdict[int, dict[int, Tensor]](dict)
                for expert, weight in zip(ids_TK[t].tolist(), weight_TK[t], strict=True):
                    holders = np.flatnonzero(self.held_ED[expert])
                    asked[int(holders[self.turn_T[t] % len(holders)])][expert] = weight
                for device, weights in asked.items():
                    for of in [{one: weights[one]} for one in weights] if self.apart else [weights]:
                        groups[device, tuple(sorted(of))][t] = of
            for (device, experts), rows in groups.items():
                clusters = [[t] for t in rows] if device == rank or not self.reach else self._clusters(x_TM, rows)
                if device != rank:
                    self.seen.rows[rank] += len(rows)
                    self.seen.sent[rank] += len(clusters)
                for members in clusters:
                    self._add(y, x_TM, {t: rows[t] for t in members}, experts, stays=device == rank)
        return torch.stack(y) if y else x_TM

    def _clusters(self, x_TM: Tensor, rows: dict[int, dict[int, Tensor]]) -> list[list[int]]:
        tokens = sorted(rows)
        cost = {(j, i): self.cost(x_TM, rows, j, i) for j, i in itertools.permutations(tokens, 2)}
        reach = known(self.reach)
        assert all(abs(one - reach) > 1e-6 for one in cost.values()), "too near to the threshold to tell"
        serves = {j: [i for i in tokens if i != j and cost[j, i] <= reach] for j in tokens}
        clusters, left = [], set(tokens)
        order = sorted(tokens, key=lambda j: (-len(serves[j]), j))
        while left:
            if self.cosine:
                order = sorted(left, key=lambda j: (-len(left.intersection(serves[j])), j))
            kept = next(j for j in order if j in left)
            members = [kept, *(i for i in serves[kept] if i in left)]
            clusters.append(members)
            left -= set(members)
        if not self.cosine:  # as many are kept, each row with the nearest of them
            keep = [members[0] for members in clusters]
            near = {i: min((cost[j, i], j) for j in keep if i in serves[j])[1] for i in set(tokens).difference(keep)}
            clusters = [[j, *(i for i in tokens if near.get(i) == j)] for j in keep]
        return clusters

    def cost(self, x_TM: Tensor, rows: dict[int, dict[int, Tensor]], kept: int, other: int) -> float:
        """What it costs that a row stands for another."""
        weights = [{expert: w.item() for expert, w in rows[t].items()} for t in (kept, other)]
        gates = [sum(of.values()) for of in weights]
        directions = [x_TM[t].detach().numpy() / np.linalg.norm(x_TM[t].detach().numpy()) for t in (kept, other)]
        far = float(np.linalg.norm(directions[0] - directions[1]))
        far += sum(abs(weights[0][e] / gates[0] - weights[1][e] / gates[1]) for e in weights[0]) / 2
        if self.cosine:
            return far
        return far * sum(w * (1 if self.gain_E is None else self.gain_E[e]) for e, w in weights[1].items())

    def _add(
        self,
        y: list[Tensor],
        x_TM: Tensor,
        rows: dict[int, dict[int, Tensor]],
        experts: tuple[int, ...],
        *,
        stays: bool,
    ) -> None:
        kept = next(iter(rows))
        gates = {t: torch.stack([*weights.values()]).sum() for t, weights in rows.items()}
        if self.medoid or len(rows) == 1:
            x, shares, scales = x_TM[kept], rows[kept], {t: gate / gates[kept] for t, gate in gates.items()}
            scales[kept] = torch.ones_like(gates[kept])
        else:
            total, scales = sum(gate.item() ** 2 for gate in gates.values()), gates
            part = {t: gate.item() ** 2 / total for t, gate in gates.items()}
            x = torch.stack([part[t] * x_TM[t] for t in rows]).sum(0)
            shares = {e: torch.stack([part[t] * rows[t][e] / gates[t] for t in rows]).sum() for e in experts}
        on_its_way = self.travelled if self.travelled is not None and not stays else lambda row: row
        x = on_its_way(x)
        out = torch.stack([shares[e] * self.w_out[e] @ functional.silu(self.w_in[e] @ x) for e in experts]).sum(0)
        out = on_its_way(out)
        for t in rows:
            y[t] = y[t] + scales[t] * out


def condensed(case: Case, **rule: Any) -> tuple[MoELanguageModel, list[CondensedExperts]]:
    """The model of a case in one process, condensing, and its experts by layer."""
    model, placement, layers = case.model(), case.placement(), list[CondensedExperts]()
    bounds = np.cumsum([0, *case.batches]) * case.length
    ranks = [range(first, last) for first, last in itertools.pairwise(bounds.tolist())]
    turn_T = (case.samples()[:, None] + torch.arange(case.length)).flatten().numpy()
    gains = rule.pop("gains", None)
    for number, layer in enumerate(model.layers):
        held_ED, gain_E, block = placement.holds(number), None if gains is None else gains[number], layer.moe
        assert isinstance(block, MoEBlock)
        layers.append(CondensedExperts(block.experts, held_ED, ranks, turn_T, gain_E=gain_E, **rule))
        block.experts = layers[-1]  # type: ignore[assignment]
    return model, layers


def gradients_of(model: nn.Module) -> dict[str, np.ndarray]:
    """Gradients by name."""
    return {name: known(p.grad).numpy() for name, p in model.named_parameters() if p.grad is not None}
