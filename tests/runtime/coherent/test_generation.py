"""Generation on real gloo processes against one process and naive recounts, its attention and cache against loops."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moeplan.planner.demo.model import Attention, ModelConfig
from moeplan.runtime.coherent import attention as attention_module
from moeplan.runtime.coherent.attention import attend_contexts, batches
from moeplan.runtime.coherent.contexts import Contexts, Held
from moeplan.runtime.coherent.generation import STEPS, Cache
from tests.runtime.coherent.generation_cases import Job, Pair, Reply, run_jobs, run_two
from tests.runtime.coherent.generation_reference import kv_bytes, recount, reference
from tests.runtime.worlds import by_case, by_rank, close

pytest.importorskip("transformers")

EVEN_4 = (2, 2, 2, 2)
PROMPTS = ((5, 3), (1,), (), (7, 2))  # the third rank has none
SHAPES = {
    "embedded": Job("standard", "embedded", EVEN_4, PROMPTS),
    "top-1": Job("coherent", "embedded", EVEN_4, PROMPTS, top_k=1, seed=1),
    "top-4, replicas on two nodes": Job("standard", "embedded", (3, 3, 3, 3), PROMPTS, top_k=4, nodes=2, seed=2),
    "replicas, even": Job("coherent", "embedded", (4, 4, 4, 4), PROMPTS, rule="even", nodes=2, seed=3),
    "unequal slots": Job("standard", "embedded", (4, 0, 3, 1), ((2, 2), (2,), (2,), ()), seed=4),
    "one-token prompts": Job("coherent", "embedded", EVEN_4, ((1,), (1, 1), (), (1,)), new=4, seed=5),
    "an end": Job("standard", "embedded", EVEN_4, PROMPTS, new=9, eos=14, seed=0),
    "an end to all": Job("standard", "embedded", EVEN_4, ((5,), (), (), ()), new=9, eos=30, seed=0),
    "one new token": Job("standard", "embedded", EVEN_4, PROMPTS, new=1, seed=6),
    "two new tokens": Job("coherent", "embedded", EVEN_4, PROMPTS, new=2, seed=7),
    "more steps than there is room for at first": Job("standard", "embedded", EVEN_4, ((2,), (), (1,), ()), new=36),
    "nothing to do": Job("standard", "embedded", EVEN_4, ((), (), (), ()), new=4),
    "gpt_oss, top-4": Job("coherent", "gpt_oss", (3, 2, 3, 2), PROMPTS, new=8, top_k=4, nodes=2, seed=1),
    "qwen3_moe": Job("coherent", "qwen3_moe", EVEN_4, PROMPTS, new=8),
    "mixtral": Job("coherent", "mixtral", EVEN_4, PROMPTS, new=8),
    "olmoe": Job("coherent", "olmoe", EVEN_4, PROMPTS, new=5),
}
COHERENT = {name: replace(job, dispatch="coherent") for name, job in SHAPES.items()}
JOBS = [*COHERENT.values(), *(job for job in SHAPES.values() if job.dispatch == "standard")]
IDS = [*COHERENT, *(f"{name}, standard" for name, job in SHAPES.items() if job.dispatch == "standard")]
TWO = Job("coherent", "gpt_oss", (5, 4), ((4, 2), (1,)), seed=8)
every_job = pytest.mark.parametrize("index", range(len(JOBS)), ids=IDS)


@pytest.fixture(scope="module")
def replies() -> list[list[Reply]]:
    """One world of 4 ranks for all jobs: replies by job, then rank."""
    return by_case(4, run_jobs, JOBS)


@pytest.fixture(scope="module")
def two() -> list[Pair]:
    """One world of 2 ranks: by rank, refusals, gathers and events of `TWO`."""
    return by_rank(2, run_two, TWO)


@every_job
def test_tokens_logits_traffic_and_memory_are_those_of_a_single_process(index: int, replies: list[list[Reply]]) -> None:
    job, ranks, expected = JOBS[index], replies[index], reference(JOBS[index])
    assert [new for reply in ranks for new in reply.tokens] == expected.tokens
    assert [reply.traffic for reply in ranks] == recount(job)
    if job.dispatch == "coherent":  # logits of padded prompts
        by_sample = [logits for reply in ranks for logits in reply.logits]
        assert len(by_sample) == len(job.lengths)
        assert all(map(close, by_sample, expected.logits))
    for rank, reply in enumerate(ranks):
        held = job.lengths if job.dispatch == "coherent" else job.prompts[rank]
        assert reply.cache_bytes == 3 * sum(length + job.new - 1 for length in held) * kv_bytes(job)
    lengths = {len(new) for new in expected.tokens}
    if job.eos is not None:  # its end comes to all, or in the middle and not to all
        assert lengths == {3} or min(lengths) < max(lengths) == job.new


@every_job
def test_collectives_are_as_many_as_the_docstring_says(index: int, replies: list[list[Reply]]) -> None:
    job, coherent = JOBS[index], JOBS[index].dispatch == "coherent"
    tells = coherent or job.eos is not None
    taken = max([len(new) for new in reference(job).tokens], default=1)
    early = tells and taken < job.new  # one step without a token shows it
    forwards = taken + early if tells else job.new
    steps_told = tells * (forwards - 1 if early else max(0, forwards - 2))
    of_block = 3 if not coherent else 2 if job.top_k == 1 else 4
    gathers = steps_told
    if coherent:
        gathers += steps_told - early + 4 + 4 * bool(job.lengths)  # keys and values of nobody are not sent
    placement = job.case().placement()
    replicated = sum(int(placement.holds(layer).sum() > placement.num_experts) for layer in range(placement.num_layers))
    weights = 2 * replicated * (forwards > 0)  # of replicas, before the first experts compute
    for reply in replies[index]:
        exchanges = reply.calls["all_to_all_single"] + reply.calls["start"]
        assert exchanges == of_block * job.case().num_layers * forwards + 2 * coherent + weights
        assert sum(reply.calls[name] for name in ("gather", "all_gather_single", "all_gather_into_tensor")) == gathers
        assert reply.calls["gather"] == reply.calls[f"of {4 // job.nodes} a node"]
        assert (reply.calls["gather"] > 0) == (coherent and bool(job.lengths))  # keys and values alone
        assert reply.calls["all_gather_object"] == 1
        assert reply.calls["all_reduce"] == 0


def test_a_gather_brings_uneven_rows_of_all_ranks_in_their_order(two: list[Pair]) -> None:
    for pair in two:
        alike = [[], [0, 10], [0, 1, 2, 10, 11, 12, 13, 14]]
        assert pair.gathered == [rows for rows in alike for _ in range(3)]


def test_keys_and_values_of_a_step_travel_from_the_last_block_to_the_next_first_attention(two: list[Pair]) -> None:
    for pair in two:
        after_prompts = pair.events[pair.events.index("head") :]
        told = ["embed", "norm", "arrived", "sent", "head"] * (TWO.new - 3)
        assert after_prompts == ["head", "embed", "norm", "sent", "head", *told, "embed", "norm", "arrived", "head"]


@pytest.mark.parametrize(
    ("attempt", "told"),
    [
        ("no new token", "rank 0: 0 new tokens; expected 1 or more"),
        ("an empty prompt on rank 1", "rank 1: prompt 0 is torch.int64 [0]; expected int64 tokens in one dimension"),
        ("floats on rank 0", "rank 0: prompt 0 is torch.float32 [3]; expected int64"),
        ("a token beyond the vocabulary on rank 1", "rank 1: prompt 0 has tokens 3 to 10000; expected 0 to "),
        ("two dimensions", "rank 0: prompt 0 is torch.int64 [2, 2]; expected int64"),
        ("too few sample ids", "rank 0: sample ids [2] for 1 prompts; expected one each"),
        ("other lengths", "rank 1 asks for 5 new tokens until None, rank 0 for 4 until None; ask for the same"),
        ("other ends", "rank 1 asks for 4 new tokens until 1, rank 0 for 4 until 0; ask for the same"),
        ("training", "generation in training mode"),
        ("migrating", "generation with dispatch model 'migrating', which moves samples"),
    ],
)
def test_what_cannot_be_generated_is_refused_on_every_rank(attempt: str, told: str, two: list[Pair]) -> None:
    for pair in two:
        assert pair.refusals[attempt].startswith(f"UsageError: {told}")
        assert "\n" not in pair.refusals[attempt]


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
