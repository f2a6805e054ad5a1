"""Greedy generation with a cache of keys and values, on all ranks in step.

Legend: B samples of this rank; I samples whose keys and values it holds; G tokens of prompts; T tokens of a step that
this rank holds; R rows of a layer; L layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import UsageError
from ..engine.gather import Count, Gather, gathered
from ..engine.traffic import Traffic
from ..models.protocols import LanguageModel
from .attention import attend_contexts
from .contexts import Contexts, Held
from .ways import Coherent, Resident

STEPS = 32  # for which a cache has room at first


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """Prompts of this rank and the ends of their continuations."""

    #: prompts, samples: tokens, int64, one dimension and at least one token each, `[B]` of them; their global ids,
    #: int64 `[B]`
    prompts: Sequence[Tensor]
    samples: Tensor
    #: max_new_tokens, eos: at least 1; a token that ends its sample, itself included, None: none does
    max_new_tokens: int
    eos: int | None
    num_tokens: int | None  #: Of the model's vocabulary; None where it is not known

    def agree(self, group: dist.ProcessGroup | None) -> None:
        """See that all ranks ask for as much, and can be answered; a collective call.

        Raises
        ------
        UsageError
            On every rank, what is wrong with the request of any.
        """
        mine = self.max_new_tokens, self.eos, self._problem()
        stated = gathered(mine, group)
        for rank, (most, eos, problem) in enumerate(stated):
            if problem is not None:
                raise UsageError(f"rank {rank}: {problem}")
            if (most, eos) != stated[0][:2]:
                raise UsageError(
                    f"rank {rank} asks for {most} new tokens until {eos}, rank 0 for {stated[0][0]} until"
                    f" {stated[0][1]}; ask for the same on every rank"
                )

    def _problem(self) -> str | None:
        """Why this rank's request cannot be answered."""
        if self.max_new_tokens < 1:
            return f"{self.max_new_tokens} new tokens; expected 1 or more"
        for place, prompt in enumerate(self.prompts):
            if prompt.ndim != 1 or not len(prompt) or prompt.dtype != torch.int64:
                return (
                    f"prompt {place} is {prompt.dtype} {list(prompt.shape)}; expected int64 tokens in one dimension, at"
                    " least one"
                )
            low, high = int(prompt.min()), int(prompt.max())
            if low < 0 or (self.num_tokens is not None and high >= self.num_tokens):
                return f"prompt {place} has tokens {low} to {high}; expected 0 to {(self.num_tokens or 0) - 1}"
        if self.samples.shape != (len(self.prompts),):
            return f"sample ids {list(self.samples.shape)} for {len(self.prompts)} prompts; expected one each"
        return None


@dataclass(frozen=True, slots=True)
class Generated:
    """New tokens of each sample of this rank, the traffic between devices, and bytes of keys and values held."""

    tokens: list[Tensor]
    traffic: Traffic
    cache_bytes: int


@torch.no_grad()
def generate(model: LanguageModel, way: Coherent | Resident, request: Request) -> Generated:
    """The most likely continuation of each prompt; all ranks call it together, in a `way` just made.

    Notes
    -----
    The prompts' forward chooses the first tokens, each of the `max_new_tokens` - 1 steps that follow the next ones.
    Collectives, beside those of the routed blocks (a step's are those of any forward: of `Coherent` two a layer where
    K is 1, numbers of rows and rows, and else four; three of `Resident`):

    - `Coherent`: two for the contexts, and two a layer of the prompts; two a step but the last, the first of which,
      numbers, is on its way during the last block, and the second, keys and values of all layers, during the head and
      the choice, the embedding and the first projection of what is chosen; two at the end, for tokens to go home.
    - `Resident`: one a step but the last where there is an `eos`, on its way during the last block.

    Where all samples ended before, one step without a token shows it to all ranks.
    """
    run = _Run(model, way, request)
    run.prefill()
    for step in range(request.max_new_tokens - 1):
        if not run.goes_on(step):
            break
    return Generated(run.ended(), run.traffic.then(way.traffic), run.cache.num_bytes)


class Cache:
    """Keys and values `[R, 2, kv heads, d]` of each layer, where `contexts.row` says; room for steps doubles.

    Parameters
    ----------
    contexts
        The prompts of the samples that are kept.
    most_steps
        For which room is ever needed.
    """

    layers: list[Tensor]  #: One tensor a layer, at first of the prompts alone, `[G, ...]`

    def __init__(self, contexts: Contexts, most_steps: int) -> None:
        self.contexts, self.most_steps, self.steps, self.layers = contexts, most_steps, 0, []

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys and values held, with the room for steps to come."""
        return sum(rows.numel() * rows.element_size() for rows in self.layers)

    def make_room(self, step: int) -> None:
        """See to room for the rows of a step, counted from 0."""
        if step < self.steps:
            return
        self.steps = min(max(STEPS, 2 * self.steps), self.most_steps)
        num_rows = self.contexts.first[-1] + self.steps * len(self.contexts.rank)
        for layer, before in enumerate(self.layers):  # one after another: at most one layer is there twice
            self.layers[layer] = before.new_empty(num_rows, *before.shape[1:])
            self.layers[layer][: len(before)] = before

    def write(self, layer: int, context_T: Tensor, step: int, kv_T2: Tensor) -> None:
        """Keep the keys and values of a step's tokens, one a sample."""
        self.layers[layer][self.contexts.first[-1] + step * len(self.contexts.rank) + context_T] = kv_T2


class _Run:
    """A generation under way.

    Attributes
    ----------
    log
        The tokens chosen here, by sample x `max_new_tokens` + ordinal.
    news
        Keys and values of the last step, under way.
    traffic
        Of the forwards that are done.
    """

    newest: Held  #: The tokens chosen here that go on, int64 `[T, 1]`, by the samples in 0..I-1 whose they are

    def __init__(self, model: LanguageModel, way: Coherent | Resident, request: Request) -> None:
        self.model, self.way, self.request = model, way, request
        lengths = [len(prompt) for prompt in request.prompts]
        self.contexts = way.contexts(request.samples, request.samples.new_tensor(lengths))
        self.cache = Cache(self.contexts, request.max_new_tokens - 1)
        self.log: list[Held] = []
        self.news: Gather | None = None
        self.traffic = Traffic()

    def prefill(self) -> None:
        """Take the prompts of this rank, and choose each sample's first token."""
        contexts = self.contexts
        held = Held(self.model.embed(torch.cat([self.request.samples[:0], *self.request.prompts])), contexts.own())
        for layer in self.model.layers:
            q, kv_T2 = held.projected(layer, contexts)
            kv_R2 = self.way.shared(kv_T2, held)
            self.cache.layers.append(kv_R2)
            held = self.way.through(layer, attend_contexts(layer.attention, q, kv_R2, held, contexts), contexts)
        context_T = contexts.context[held.token]
        ends = contexts.position[held.token] + 1 == contexts.length[context_T]
        self._choose(Held(held.x[ends], context_T[ends]), 0)

    def goes_on(self, step: int) -> bool:
        """Choose the next token of each sample that has not ended; whether any rank had one."""
        contexts, final, kept = self.contexts.after(step), step + 2 == self.request.max_new_tokens, list[Held]()
        count: Count | None = None
        self.cache.make_room(step)
        held = Held(self.model.embed(self.newest.x.flatten()), self.newest.token)
        for ordinal, layer in enumerate(self.model.layers):
            q, kv_T2 = held.projected(layer, contexts)
            if ordinal == 0:
                self._learn(step - 1)
            self.cache.write(ordinal, held.token, step, kv_T2)
            kept.append(Held(kv_T2, ordinal * len(contexts.rank) + held.token))
            if ordinal + 1 == len(self.model.layers) and not final and (self._coherent or self.request.eos is not None):
                count = Count.start(sum(len(rows.token) for rows in kept), held.x.device, contexts.group)
            held = attend_contexts(layer.attention, q, self.cache.layers[ordinal], held, contexts)
            held = self.way.through(layer, held, contexts)
        counts = [1] if count is None else count.wait()
        if self._coherent and not final:
            rows = torch.cat([rows.x for rows in kept]), torch.cat([rows.token for rows in kept])
            self.news = self._coherent.sent(counts, *rows)
        self._choose(held, step + 1)
        return sum(counts) > 0

    def ended(self) -> list[Tensor]:
        """The tokens chosen for the samples of this rank."""
        log = Held.ascending(torch.cat([rows.x for rows in self.log]), torch.cat([rows.token for rows in self.log]))
        if self._coherent:
            log = self._coherent.home(log, self.contexts.rank[log.token // self.request.max_new_tokens])
        here_B = (self.contexts.rank == dist.get_rank(self.contexts.group)).nonzero()
        counts_B = (log.token // self.request.max_new_tokens == here_B).sum(dim=1)
        return list(torch.split(log.x.flatten(), counts_B.tolist()))

    @property
    def _coherent(self) -> Coherent | None:
        return self.way if isinstance(self.way, Coherent) else None

    def _choose(self, held: Held, ordinal: int) -> None:
        """Choose the token of these samples, where they live."""
        chosen_T1 = self.model.head(self.model.norm(held.x)).argmax(dim=-1, keepdim=True)
        on_T = (chosen_T1 != self.request.eos).flatten() if self.request.eos is not None else slice(None)
        self.newest = Held(chosen_T1[on_T], held.token[on_T])
        self.log.append(Held(chosen_T1, held.token * self.request.max_new_tokens + ordinal))
        self.traffic, self.way.traffic = self.traffic.then(self.way.traffic), Traffic()

    def _learn(self, step: int) -> None:
        """Keep the keys and values of a step of all ranks."""
        if self._coherent is None or self.news is None:
            return
        kv_n2, number_n = self._coherent.arrived(self.news, self.cache.layers[0])
        order = number_n.argsort().view(len(self.cache.layers), -1)  # every sample in the step has one a layer
        for layer, rows in enumerate(order):
            self.cache.write(layer, number_n[order[0]], step, kv_n2[rows])
        self.news = None
