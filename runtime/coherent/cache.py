"""The cache of generation: keys and values of every layer, of the tokens of prompts and then of each step's.

Legend: I samples; T tokens of a step; G tokens of prompts; R rows of a layer; L layers.
"""

from torch import Tensor

from .contexts import Contexts

__all__ = ["Cache"]

STEPS = 32  # for which there is room at first


class Cache:
    """Keys and values `[R, 2, kv heads, d]` of each layer, where `contexts.row` says; room for steps doubles.

    Parameters
    ----------
    contexts
        The prompts of the samples that are kept.
    most_steps
        For which room is ever needed.

    Attributes
    ----------
    layers
        One tensor a layer, at first of the prompts alone, `[G, ...]`.
    """

    layers: list[Tensor]

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
