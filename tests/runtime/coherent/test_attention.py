"""Attention of scattered tokens to their samples and the cache they look into, against loops over tokens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moeplan.planner.demo.model import Attention, ModelConfig
from moeplan.runtime.coherent import attention as attention_module
from moeplan.runtime.coherent.attention import attend_contexts, batches
from moeplan.runtime.coherent.contexts import Contexts, Held
from moeplan.runtime.coherent.generation import STEPS, Cache

CONFIG = ModelConfig(hidden_size=16, num_heads=4, num_kv_heads=2)
LENGTHS = (9, 1, 4, 12, 4)


def contexts(lengths: tuple[int, ...] = LENGTHS) -> Contexts:
    return Contexts.of(
        100 + torch.arange(len(lengths)), torch.tensor(lengths), torch.zeros(len(lengths), dtype=torch.int64), None
    )


def naive(attention: Attention, q: torch.Tensor, kv: torch.Tensor, held: Held, of: Contexts) -> torch.Tensor:
    """One token at a time, with the keys that it sees and no mask."""
    y = held.x.clone()
    for row, token in enumerate(held.token.tolist()):
        position, context = int(of.position[token]), int(of.context[token])
        begin = 0 if attention.window is None else max(0, position - attention.window + 1)
        rows = [int(of.row(torch.tensor(context), torch.tensor(at))) for at in range(begin, position + 1)]
        k, v = kv[rows].unbind(1)
        y[row] += attention.attend(q[row : row + 1], k, v, torch.ones(1, len(rows), dtype=torch.bool))[0]
    return y


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("bounds", [None, (3, 7, 20), (1, 1, 1), (2, 1000, 1000)])
def test_scattered_tokens_see_what_they_see_alone(
    window: int | None, bounds: tuple[int, int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, bound in zip(("QUERIES", "KEYS", "PAIRS"), bounds or (), strict=False):
        monkeypatch.setattr(attention_module, name, bound)
    torch.manual_seed(0)
    attention, whole = Attention(CONFIG).double().eval(), contexts()
    attention.window = window
    kv = torch.randn(sum(LENGTHS), 2, 2, 4, dtype=torch.float64)
    for token in (torch.rand(sum(LENGTHS)).argsort()[:17].sort().values, torch.arange(sum(LENGTHS)), torch.arange(0)):
        held = Held(torch.randn(len(token), 16, dtype=torch.float64), token)
        q = torch.randn(len(token), 4, 4, dtype=torch.float64)
        result = attend_contexts(attention, q, kv, held, whole)
        assert torch.equal(result.token, token)
        torch.testing.assert_close(result.x, naive(attention, q, kv, held, whole), rtol=1e-12, atol=1e-12)


@given(st.lists(st.tuples(st.integers(1, 1024), st.integers(0, 5000)), min_size=1, max_size=40))
def test_runs_that_attend_at_once_are_each_there_once_and_less_than_half_padding(sizes: list[tuple[int, int]]) -> None:
    count_C, more_C = torch.tensor(sizes).unbind(1)
    keys_C = count_C + more_C
    at_once = list(batches(count_C, keys_C))
    assert sorted(torch.cat(at_once).tolist()) == list(range(len(sizes)))
    for run_b in at_once:
        queries, keys = int(count_C[run_b].max()), int(keys_C[run_b].max())
        assert len(run_b) * queries < 2 * int(count_C[run_b].sum())
        assert len(run_b) == 1 or len(run_b) * keys <= min(2**16, 2**21 // queries)


@pytest.mark.parametrize("window", [None, 3])
def test_tokens_of_a_step_see_the_prompt_and_the_steps_before(window: int | None) -> None:
    torch.manual_seed(1)
    attention, prompts = Attention(CONFIG).double().eval(), contexts()
    attention.window = window
    cache = Cache(prompts, 3)
    cache.layers.append(torch.randn(sum(LENGTHS), 2, 2, 4, dtype=torch.float64))
    everyone = torch.arange(len(LENGTHS))
    for step in range(3):
        cache.make_room(step)
        cache.write(0, everyone, step, torch.randn(len(LENGTHS), 2, 2, 4, dtype=torch.float64))
        held = Held(torch.randn(3, 16, dtype=torch.float64), torch.tensor([0, 2, 3]))
        q = torch.randn(3, 4, 4, dtype=torch.float64)
        result = attend_contexts(attention, q, cache.layers[0], held, prompts.after(step))
        torch.testing.assert_close(
            result.x, naive(attention, q, cache.layers[0], held, prompts.after(step)), rtol=1e-12, atol=1e-12
        )


def test_a_cache_keeps_what_was_written_while_its_room_doubles_up_to_the_steps_there_are() -> None:
    of, most = contexts((2, 3)), 5 * STEPS
    cache = Cache(of, most)
    cache.layers += [torch.full((5, 2, 1, 1), -1.0 - layer) for layer in range(2)]
    rooms = []
    steps = [of.row(torch.arange(2), of.length + step) for step in range(most)]
    assert torch.cat([of.row(of.context, of.position), *steps]).tolist() == [*range(5 + 2 * most)]
    for step in range(most):
        cache.make_room(step)
        rooms.append(len(cache.layers[0]))
        for layer in range(2):
            cache.write(layer, torch.tensor([0, 1]), step, torch.tensor([[10.0], [20.0]]).add(step).view(2, 1, 1, 1))
    assert [len(rows) for rows in cache.layers] == [5 + 2 * most] * 2
    assert sorted(set(rooms)) == [5 + 2 * steps for steps in (STEPS, 2 * STEPS, 4 * STEPS, most)]
    assert cache.num_bytes == 2 * (5 + 2 * most) * 2 * 4
    for layer, rows in enumerate(cache.layers):
        assert (rows[:5] == -1 - layer).all()
        for step in range(most):
            written = rows[steps[step], 1, 0, 0]
            assert written.tolist() == [10 + step, 20 + step]
