"""SGLang's waterfill: every routed token one shared expert, where there is room, and few tokens at home."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from moeplan.solvers.waterfill import Waterfill, rooms

Ints = NDArray[np.int64]


def sent_by_one(*sent: int, source: int = 0) -> Ints:
    """Pairs `[1, 1, D, D]` that one source sends, the others nothing."""
    table = np.zeros((1, 1, len(sent), len(sent)), np.int64)
    table[0, 0, source] = sent
    return table


def tokens_of(number: int, source: int, devices: int) -> Ints:
    table = np.zeros((1, devices), np.int64)
    table[0, source] = number
    return table


def room(*sent: int, tokens: int = 64, top_k: int = 2, source: int = 0) -> list[int]:
    """Room of every device for the shared experts of a source that sends so many pairs."""
    table = rooms(sent_by_one(*sent, source=source), tokens_of(tokens, source, len(sent)), top_k)
    return [*map(int, table[0, 0, source])]


def test_room_is_what_lacks_to_the_level_of_pairs_and_shared_experts_together() -> None:
    # 128 pairs and 64 shared experts: a level of 64 on three devices
    assert room(100, 20, 8, source=1) == [0, 44, 50]  # 44 at home, 10/11 of 56 elsewhere
    assert room(100, 20, 8, source=2) == [0, 40, 56]


def test_with_few_tokens_or_none_shared_experts_stay_at_home() -> None:
    assert room(100, 20, 6, tokens=63) == [1, 0, 0]
    assert room(0, 0, 0, tokens=0, source=2) == [0, 0, 1]


@pytest.mark.parametrize(
    ("sent", "taken"),
    [
        ((5, 5, 5, 5), 0),  # as much anywhere
        ((11, 10, 11, 11), 0),  # 1/11 less is not enough
        ((10, 9, 10, 10), 1),
        ((10, 9, 9, 10), 1),  # not 1/11 less than that before it
        ((10, 10, 10, 9), 3),
        ((9, 9, 10, 10), 0),
    ],
)
def test_without_room_a_device_with_clearly_less_is_taken(sent: tuple[int, ...], taken: int) -> None:
    assert room(*sent, top_k=1000) == [int(device == taken) for device in range(4)]


def test_tokens_draw_their_device_by_their_number_and_source() -> None:
    fill = Waterfill(sent_by_one(100, 20, 8, source=1), tokens_of(64, 1, 3), 2)
    home, step = np.full(8, 1), np.zeros(8, np.int64)
    devices = np.tile(np.array([[0, 2]], np.int32), (8, 1))
    # 1664525 (i xor 0x9E3779B9) + 1013904223 modulo 2^32, modulo 94: below 44 at home, else device 2
    first, then = (fill.choose(0, devices, home, step).tolist() for _ in range(2))
    assert first == [2, 1, 1, 2, 2, 2, 1, 1] != then


@given(
    seed=st.integers(0, 2**32 - 1),
    devices=st.integers(2, 9),
    top_k=st.integers(1, 4),
    tokens=st.integers(1, 400),
    skew=st.floats(0, 3),
)
def test_every_routed_token_has_one_shared_expert_where_there_is_room(
    seed: int, devices: int, top_k: int, tokens: int, skew: float
) -> None:
    rng = np.random.default_rng(seed)
    share = np.exp(rng.normal(0, skew, devices))
    device_TK = rng.choice(devices, (tokens, top_k), p=share / share.sum()).astype(np.int32)
    device_TK[rng.random((tokens, top_k)) < 0.2] = -1
    home = rng.integers(devices, size=tokens)
    sent, number = np.zeros((1, 1, devices, devices), np.int64), np.bincount(home, minlength=devices)[None]
    token, choice = np.nonzero(device_TK >= 0)
    np.add.at(sent[0, 0], (home[token], device_TK[token, choice]), 1)
    step, cut = np.zeros(tokens, np.int64), int(rng.integers(tokens + 1))
    fill = Waterfill(sent, number, top_k)
    parts = [fill.choose(0, device_TK[part], home[part], step[part]) for part in (slice(0, cut), slice(cut, None))]
    shared = np.concatenate(parts)
    again = Waterfill(sent, number, top_k).choose(0, device_TK, home, step)
    np.testing.assert_array_equal(shared, again, err_msg="batches of a step change nothing")
    routed = device_TK.max(axis=1) >= 0
    assert (shared[~routed] == -1).all()
    assert (rooms(sent, number, top_k)[0, 0, home[routed], shared[routed]] > 0).all()
    few = (number[0] < 64)[home] & routed
    np.testing.assert_array_equal(shared[few], home[few])


def test_what_devices_lack_to_the_mean_is_filled_up() -> None:
    rng, devices, tokens = np.random.default_rng(0), 8, 4096
    share = np.array([3, 2, 1, 1, 1, 1, 0.5, 0.5]) / 10
    device_TK = rng.choice(devices, (tokens, 4), p=share).astype(np.int32)
    home = np.arange(tokens) % devices
    sent = np.zeros((1, 1, devices, devices), np.int64)
    np.add.at(sent[0, 0], (np.repeat(home, 4), device_TK.ravel()), 1)
    fill = Waterfill(sent, np.full((1, devices), tokens // devices), 4)
    filled = np.bincount(fill.choose(0, device_TK, home, np.zeros(tokens, np.int64)), minlength=devices)
    routed = sent.sum(axis=(0, 1, 2))
    at_home = routed + tokens // devices
    assert filled.sum() == tokens
    assert (routed + filled).max() == routed.max(), "the busiest device takes no more"
    assert (routed + filled).min() > 1.2 * at_home.min()
