"""What is predicted of emulated steps, against loops over tokens and exchanges."""

import itertools
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch.distributed as dist

from benchmarks.emulated_cluster.calibration import Profile
from benchmarks.emulated_cluster.condensing import CONDENSING, Recorded, inputs, models, sent
from benchmarks.emulated_cluster.model import STRIDE, Sizes
from benchmarks.emulated_cluster.pipelining import MOST, PIPELINING
from benchmarks.emulated_cluster.prediction import Predictor, exchange_s, generated, replica_flows, training_seconds
from benchmarks.emulated_cluster.rehoming import BATCHES, REHOMING, left
from benchmarks.emulated_cluster.rehoming import inputs as batches
from benchmarks.emulated_cluster.routing import Workload
from benchmarks.emulated_cluster.timing import Seconds
from benchmarks.emulated_cluster.training import STATIC, TOKENS, WARM, Drift, Trained
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.fits.fit import Prediction
from moeplan.profilers.fits.laws import AlphaBeta
from moeplan.profilers.world import World
from moeplan.runtime.engine.layer_placement import LayerPlacement
from moeplan.runtime.rebalancing import placement_of
from moeplan.solvers import contiguous, netmoe
from moeplan.solvers.pipemoe import nested_pairs
from moeplan.solvers.placement import Placement
from tests.runtime.worlds import by_rank

Array = np.ndarray
CLUSTER = Cluster(2, 2)
LAYERS, EXPERTS, KINDS = 3, 8, 24
SIZES = Sizes(num_experts=EXPERTS, hidden_size=16, kv_size=8, start_s=0.5, pair_s=0.25, attention_s=0.125)
CALL_S = 3.0


@dataclass(frozen=True, slots=True)
class Lines:
    """A profile of round numbers, inter-node bytes dearer."""

    wait: AlphaBeta = field(default_factory=lambda: AlphaBeta(a_s=1.0, b_s=2.0))
    call_s: float = CALL_S

    def inter_s(self, n: Array) -> Prediction:
        """4 s and 1/4 s a byte."""
        return _certain(4 + n / 4)

    def intra_s(self, n: Array) -> Prediction:
        """2 s and 1/64 s a byte."""
        return _certain(2 + n / 64)

    def gather_s(self, n: float) -> float:
        """5 s and 1/8 s a byte."""
        return 5 + n / 8

    def chunk_s(self, n: Array) -> Array:
        """As between nodes, with less to start."""
        return 1e-3 + 8e-8 * n


def _certain(seconds: Array) -> Prediction:
    return Prediction(seconds, seconds, seconds, np.zeros(seconds.shape, bool))


@dataclass
class Step:
    """A step as one would write it down: a sum of parts."""

    where: list[list[list[int]]]  # of each token, layer and choice
    here: list[int]
    total: float = 0.0

    def exchange(self, rows: list[tuple[int, int]], width: int) -> None:
        """Rows from device to device; nodes share a port, devices have one inside a node."""
        inside: dict[tuple[int, str], int] = {}
        between: dict[tuple[int, str], int] = {}
        for start, end in rows:
            ports = inside if start // 2 == end // 2 else between
            for place, way in ((start, "out"), (end, "in")):
                key = (place if ports is inside else place // 2, way)
                ports[key] = ports.get(key, 0) + (start != end)
        least = (
            2 + 4 * width * max(inside.values(), default=0) / 64,
            4 + 4 * width * max(between.values(), default=0) / 4,
        )
        self.total += max(least)

    def copies(self, layer: int, ends: list[int], *, times: int = 1) -> None:
        """Hidden vectors between tokens' ends and distinct devices."""
        rows = [(end, device) for end, token in zip(ends, self.where, strict=True) for device in set(token[layer])]
        for _ in range(times):
            self.exchange(rows, SIZES.hidden_size)

    def experts_s(self, layer: int) -> float:
        """Of the busiest device."""
        asked = [device for token in self.where for device in token[layer]]
        return 1.0 + 2.0 * (0.5 + 0.25 * max(asked.count(device) for device in range(4)))

    def attend(self) -> None:
        """On the busiest device."""
        self.total += 0.125 * max(self.here.count(device) for device in range(4))

    def attend_padded(self) -> None:
        """On the device that computes most: its samples of one token at once, then those of two or three, padded."""
        most = 0
        for device in range(4):
            queries = [self.here[sample * 3 : sample * 3 + 3].count(device) for sample in range(8)]
            groups = [[count for count in queries if count.bit_length() == bits] for bits in (1, 2)]
            most = max(most, sum(len(group) * max(group, default=0) for group in groups))
        self.total += 0.125 * most

    def gather(self) -> None:
        """K and V of every token on every device: those of a node leave it once, and reach the other."""
        first = sum(device < 2 for device in self.here)
        self.total += 5 + 4 * SIZES.kv_size * max(first, len(self.here) - first) / 8 + CALL_S


@pytest.fixture(params=[1, 2])
def work(request: pytest.FixtureRequest) -> Workload:
    """Eight samples of three tokens, one or two experts each."""
    rng = np.random.default_rng(5)
    ids = np.stack([[rng.permutation(EXPERTS)[: request.param] for _ in range(LAYERS)] for _ in range(KINDS)])
    return Workload(ids, rng.integers(KINDS, size=(8, 3)), EXPERTS)


@pytest.fixture
def placement() -> Placement:
    """Another one in every layer."""
    rng = np.random.default_rng(6)
    rows = [np.sort(rng.permutation(EXPERTS).reshape(4, 2), axis=1).ravel() for _ in range(LAYERS)]
    return Placement(np.array(rows, np.int32), np.full(4, 2), EXPERTS)


def predicted(work: Workload, placement: Placement, after: int = 0) -> Predictor:
    """The predictor under the round numbers."""
    profile: Profile = Lines()  # type: ignore[assignment]
    return Predictor.of(profile, CLUSTER, work, SIZES, placement, after)


def written(work: Workload, placement: Placement, after: int = 0) -> Step:
    """The step with the device of every choice looked up."""
    rows = placement.physical_to_logical.tolist()
    where = [
        [[rows[layer].index(expert) // 2 for expert in chosen] for layer, chosen in enumerate(work.ids[kind].tolist())]
        for kind in ((work.tokens.ravel() + STRIDE * after) % KINDS).tolist()
    ]
    return Step(where, [token // 6 for token in range(24)])


@pytest.mark.parametrize("backward", [False, True])
def test_standard_steps_are_the_sum_of_their_parts(work: Workload, placement: Placement, backward: bool) -> None:
    step = written(work, placement)
    for layer in range(LAYERS):
        step.attend()
        step.copies(layer, step.here, times=4 if backward else 2)
        step.total += CALL_S + step.experts_s(layer) * (3 if backward else 1)
    assert predicted(work, placement).standard(backward=backward) == pytest.approx(step.total)


def go_through(step: Step, layer: int) -> None:
    """A coherent layer: tokens attend, leave, and live where their first expert is."""
    step.attend_padded()
    step.copies(layer, step.here)
    step.total += CALL_S + step.experts_s(layer)
    step.here = [token[layer][0] for token in step.where]
    if len(step.where[0][layer]) > 1:
        step.copies(layer, step.here)


def test_coherent_steps_are_the_sum_of_their_parts(work: Workload, placement: Placement) -> None:
    step = written(work, placement)
    homes = step.here
    for layer in range(LAYERS):
        step.gather()
        go_through(step, layer)
    step.total += 3 * CALL_S
    step.exchange(list(zip(step.here, homes, strict=True)), SIZES.hidden_size)
    assert predicted(work, placement).coherent() == pytest.approx(step.total)


def test_generations_start_every_step_where_the_last_one_ended(work: Workload, placement: Placement) -> None:
    here, total = written(work, placement).here, 0.0
    for after in range(3):
        step = written(work, placement, after)
        step.here, told = here, []
        for layer in range(LAYERS):
            told += step.here
            if after == 0:
                step.gather()
            go_through(step, layer)
        here, step.here = step.here, told
        if after == 1:
            step.gather()
        total += step.total
    steps = [predicted(work, placement, after) for after in range(3)]
    assert generated(steps, coherent=True) == pytest.approx(total + 5 * CALL_S)
    assert generated(steps, coherent=False) == pytest.approx(2 * CALL_S + sum(step.standard() for step in steps))


def test_samples_that_move_are_dispatched_from_their_new_homes(work: Workload, placement: Placement) -> None:
    step = written(work, placement)
    for layer in range(LAYERS):
        step.attend()
        copies = [
            [sum(device in step.where[3 * sample + at][layer] for at in range(3)) for device in range(4)]
            for sample in range(8)
        ]
        pairs = np.full(8, 3 * work.ids.shape[2])
        found = netmoe.rehome("sum", np.array(copies), pairs, CLUSTER, copy_bytes=64, bounded=False)
        step.copies(layer, step.here)
        step.here = np.repeat(found.device_of_sample, 3).tolist()
        step.copies(layer, step.here)
        step.total += 3 * CALL_S + step.experts_s(layer)
    assert predicted(work, placement).migrating("sum") == pytest.approx(step.total)


def test_copies_and_pairs_between_nodes_are_counted_anew_in_every_exchange(
    work: Workload, placement: Placement
) -> None:
    step, busiest, combined = written(work, placement), 0, 0
    homes = [np.roll(step.here, 6 * layer) // 2 for layer in range(LAYERS + 1)]  # nodes
    for layer, ends in enumerate(itertools.pairwise(homes)):
        for end_T in ends:
            through: Counter[str] = Counter()
            for home, token in zip(end_T.tolist(), step.where, strict=True):
                for device in set(token[layer]):
                    if device // 2 != home:
                        through.update([f"out of {home}", f"into {device // 2}"])
            busiest += max(through.values())
        for home, token in zip(ends[1].tolist(), step.where, strict=True):
            combined += sum(device // 2 != home for device in token[layer])
    devices = [np.roll(step.here, 6 * layer) for layer in range(LAYERS + 1)]
    assert predicted(work, placement).busiest(devices) == busiest
    assert predicted(work, placement).combined(devices) == combined


def test_the_planned_degrees_are_those_predicted_to_be_fastest() -> None:
    profile: Profile = Lines(AlphaBeta(a_s=1e-4, b_s=1.0))  # type: ignore[assignment]
    *shapes, trained = PIPELINING.prepare(CLUSTER)
    assert trained.trained
    faster = replace(trained, sizes=replace(trained.sizes, pair_s=trained.sizes.pair_s / 2))
    assert len(faster.planned(profile)) == 2  # one degree for both passes is another plan there
    for shape in (*shapes, trained, faster):
        tried = nested_pairs(MOST).tolist() if shape.trained else [(degree, 0) for degree in range(1, MOST + 1)]
        taken = {(there, back): shape.layer_s(profile, (there, back)) for there, back in tried}
        *joint, best = shape.planned(profile)
        assert taken[best] == pytest.approx(min(taken.values()))
        alike = [seconds for (there, back), seconds in taken.items() if there == back]
        assert all(taken[degrees] == pytest.approx(min(alike)) for degrees in joint)


def test_what_is_predicted_for_a_round_is_the_batch_that_runs_in_it() -> None:
    one = REHOMING.prepare(CLUSTER)[0]
    steps = itertools.cycle(batches(CLUSTER, 1, one))
    next(steps)  # not timed
    for number in range(BATCHES + 2):
        tokens, samples = next(steps)
        assert tokens.tolist() == one.of_round(number).of_rank(1, CLUSTER.num_devices).tolist()
        assert samples.tolist() == list(range(len(tokens), 2 * len(tokens)))


SAVED = {"2x2": [39.10, 42.94, 34.49, 36.10, 42.36], "4x2": [39.02, 35.79, 38.26, 34.02, 38.83]}  # %, NetMoE, Table 5


@pytest.mark.parametrize("name", SAVED)
def test_samples_are_as_local_as_those_of_the_paper_on_average(name: str) -> None:
    cluster = Cluster.parse(name)
    for one in REHOMING.prepare(cluster):
        work = one.steps[0]
        placement = contiguous.solve(work.ids.shape[1], work.num_experts, cluster).placement
        steps = [Predictor.of(Lines(), cluster, work, one.sizes, placement) for work in one.steps]  # type: ignore[arg-type]
        found = left(steps)["pairs combined between nodes, %"]
        assert found == pytest.approx(1 - np.mean(SAVED[name]) / 100, abs=0.025)


# Condensed rows


def travelled(world: World, one: Recorded) -> dict[str, tuple[int, int, list[int]]]:
    """What a rank sends in the second step, by way: hidden vectors, their bytes, and the pairs that it computed."""
    found = {}
    for way, model in models(CLUSTER, one).items():
        model(*inputs(world.rank, one, CLUSTER)[1])
        found[way] = model.traffic.copies, model.traffic.payload_bytes, list(model.traffic.loads)
    return found


def test_rows_that_others_stand_for_are_predicted_as_the_runtime_sends_them() -> None:
    (one,) = CONDENSING.prepare(CLUSTER)
    ranks = by_rank(4, travelled, one)
    for way, (rows, num_bytes, _) in ranks[0].items():
        layers = sent(CLUSTER, one, way, 1)
        for rank, told in enumerate(ranks):
            assert told[way][0] == sum(layer.there[rank].sum() + layer.back[rank].sum() for layer in layers)
            assert told[way][2] == [layer.pairs[rank] for layer in layers]
        assert num_bytes == rows * one.row_bytes(way)
    assert len({told[0] for told in ranks[0].values()}) == 4  # fp8 sends as many as it is added to


# Training under replicas that follow the load


def test_rows_of_replicas_are_those_that_the_runtime_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    table = np.array([[0, 1, 4, 5], [2, 3, 4, 0], [4, 6, 7, -1], [4, 0, 1, -1]])
    owner = np.array([3, 0, 1, 1, 2, 0, 2, 2])
    expected = replica_flows(table, owner)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 4)
    for rank in range(4):
        monkeypatch.setattr(dist, "get_rank", lambda group=None, rank=rank: rank)
        place = LayerPlacement.of(placement_of(table, 8), 0, devices_per_node=2, group=None, owner=owner)
        assert place.rows is not None
        cut = place.rows._cut(12)
        for route, flow in zip((cut.scatter, cut.exchange), expected, strict=True):
            assert route.sent[0] == pytest.approx(12 * flow[rank])
            assert route.received[0] == pytest.approx(12 * flow[:, rank])


def test_an_exchange_waits_for_the_busiest_node_or_rank() -> None:
    flow = np.array([[9, 7, 3, 0], [0, 0, 5, 1], [0, 2, 0, 90], [0, 0, 0, 0]])  # 9 bytes leave node 0, 2 leave node 1
    profile: Profile = Lines()  # type: ignore[assignment]
    assert exchange_s(profile, CLUSTER, flow) == max(4 + 9 / 4, 2 + 90 / 64)
    flow[2, 3] = 900
    assert exchange_s(profile, CLUSTER, flow) == 2 + 900 / 64
    assert exchange_s(profile, CLUSTER, np.eye(4)) == 0


def test_a_step_of_training_is_the_sum_of_its_parts() -> None:
    pairs = np.zeros((WARM + 2, 1, EXPERTS, 4), np.int64)
    pairs[:, 0, 0, 0], pairs[:, 0, 7, 0] = 6, 4  # expert 0 is on devices 0 and 2, expert 7 on 3
    table = np.array([[[0, 1, 2], [3, 4, -1], [0, 5, -1], [6, 7, -1]]])
    owners = np.array([[[0, 0, 0, 1, 1, 2, 3, 3]]] * (WARM + 2))
    owners[-1, 0, 0] = 2  # the last step's owner of expert 0 is on another node than before
    work = Workload(np.zeros((1, 1, 1), np.int64), np.zeros((1, 1), np.int64), EXPERTS)
    one = Drift("", pairs, work, replace(SIZES, expert_size=5), {})
    trained = Trained(Seconds(()), [table] * (WARM + 2), [*owners])
    before, after = training_seconds(Lines(), CLUSTER, one, STATIC, trained)  # type: ignore[arg-type]
    # Device 3 computes 4 pairs of expert 7. So does device 0 of expert 0, and sends 2 + 4 to the other node.
    experts_s, travel_s, moves_s = 1 + 2 * (0.5 + 0.25 * 4), 4 + 4 * 16 * 6 / 4, 4 + 16 * 5 / 4 + 4 * CALL_S
    parts = [3 * experts_s + 0.125 * TOKENS, 4 * travel_s, 2 * (4 + 4 * 5 / 4)]
    assert before.tolist() == [*parts, moves_s, 2 * CALL_S]
    assert after.tolist() == [*parts, 0, 2 * CALL_S]
