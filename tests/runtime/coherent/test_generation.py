"""Generation on real gloo processes, against the same model in one process and naive recounts."""

from dataclasses import replace

import pytest

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
    lengths = {len(new) for new in expected.tokens}  # an end comes in the middle and not to all, or to all
    assert job.eos is None or (len(lengths) > 1 and max(lengths) == job.new) or lengths == {3}


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
    for reply in replies[index]:
        assert reply.calls["all_to_all_single"] == of_block * job.case().num_layers * forwards + 2 * coherent
        assert reply.calls["all_gather_single"] + reply.calls["all_gather_into_tensor"] == gathers
        assert reply.calls["all_gather_object"] == 1
        assert reply.calls["all_reduce"] == 0


def test_a_gather_brings_uneven_rows_of_all_ranks_in_their_order(two: list[Pair]) -> None:
    for pair in two:
        assert pair.gathered == [[], [0, 10], [0, 1, 2, 10, 11, 12, 13, 14]]


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
