"""What a step should take by the profile taken before: the planner's closed forms, one part after the other.

They are those of `solvers.seconds`, on exactly the routing that is then run.

The link of a node is one port that its ranks share, so that between nodes the busiest *node* decides.

Legend: T tokens; L layers; K experts per token; I samples; D devices; N nodes; C link classes (intra, inter).
"""

from dataclasses import dataclass

import numpy as np
import torch

from moeplan.profilers.cluster import Cluster
from moeplan.runtime.coherent.attention import batches
from moeplan.solvers import netmoe, quota
from moeplan.solvers.cost import inter_ratio
from moeplan.solvers.flexmoe.state import holders_in
from moeplan.solvers.placement import Placement
from moeplan.solvers.ports import link_classes, port_copies, remote_visits
from moeplan.solvers.seconds import exchange_seconds, slowest

from .calibration import Profile
from .model import BACKWARD, STRIDE, Sizes
from .routing import Workload
from .training import IDEAL, MOVE_CALLS, STATE_BYTES, TODAY, TOKENS, WARM, Drift, Trained

Array = np.ndarray


@dataclass(frozen=True, slots=True)
class Predictor:
    """Seconds of the steps of a workload under a placement.

    Parameters
    ----------
    device
        Of each token's experts, `[L, T, K]`.
    home
        Where each token starts, `[T]`.
    """

    profile: Profile
    cluster: Cluster
    sizes: Sizes
    device: Array
    home: Array
    num_samples: int

    @classmethod
    def of(
        cls, profile: Profile, cluster: Cluster, work: Workload, sizes: Sizes, placement: Placement, after: int = 0
    ) -> "Predictor":
        """Predictor of all tokens of a step, or of those that follow them so many steps `after`."""
        samples, length = work.tokens.shape
        ids_TLK = work.ids[(work.tokens.ravel() + STRIDE * after) % len(work.ids)]
        device_LE = devices_of(placement)
        device_LTK = np.stack([device_E[ids_TLK[:, layer]] for layer, device_E in enumerate(device_LE)])
        home_T = np.repeat(np.arange(samples) * cluster.num_devices // samples, length)
        return cls(profile, cluster, sizes, device_LTK, home_T, samples)

    def standard(self, *, backward: bool = False) -> float:
        """Tokens return: attention, counts, dispatch, experts, combine; backward the same exchanges again."""
        total = 0.0
        for device_TK in self.device:
            there, experts_s = self.copies(device_TK, self.home), self.experts(device_TK)
            total += self.attention(self.home) + self.profile.call_s + 2 * there + experts_s
            total += (2 * there + BACKWARD * experts_s) * backward
        return total

    def coherent(self) -> float:
        """Tokens stay at their first expert; K and V are gathered before every attention; at last they go home.

        Exchanges of next to nothing: two of contexts, one a gather, one at the end.
        """
        gathers = [self.gather(self.rows(here_T)) for here_T in self.lives(self.home)[:-1]]
        home_s = self.copies(self.home[:, None], self.lives(self.home)[-1])
        return (3 + len(gathers)) * self.profile.call_s + sum(gathers) + self.through(self.home) + home_s

    def through(self, here_T: Array) -> float:
        """Attention and routed blocks of coherent tokens, from where they live: counts, dispatch, experts, combine."""
        total = 0.0
        for device_TK, before_T, after_T in zip(self.device, self.lives(here_T), self.lives(here_T)[1:], strict=False):
            total += self.padded_attention(before_T) + self.profile.call_s
            total += self.copies(device_TK, before_T) + self.experts(device_TK)
            if device_TK.shape[1] > 1:
                total += self.copies(device_TK, after_T)
        return total

    def lives(self, here_T: Array) -> list[Array]:
        """Where coherent tokens live before every layer and at last, from where they are."""
        return [here_T, *(device_TK[:, 0] for device_TK in self.device)]

    def rows(self, here_T: Array) -> Array:
        """The keys and values of tokens by the device they are on, `[D]`."""
        return np.bincount(here_T, minlength=self.cluster.num_devices)

    def gather(self, rows_D: Array) -> float:
        """Seconds until all devices have these keys and values: those of the fullest node pass N - 1 links in turn."""
        fullest = rows_D.reshape(-1, self.cluster.devices_per_node).sum(axis=1).max()
        return self.profile.gather_s(float((self.cluster.num_nodes - 1) * fullest * 4 * self.sizes.kv_size))

    def migrating(self, method: str, *, backward: bool = False) -> float:
        """Samples go where `netmoe.rehome` sends them; two calls a layer more, of their counts and of destinations."""
        total, homes = 0.0, self.homes(method)
        for device_TK, here_T, next_T in zip(self.device, homes, homes[1:], strict=False):
            exchanges = self.copies(device_TK, here_T) + self.copies(device_TK, next_T)
            experts_s = self.experts(device_TK)
            total += self.attention(here_T) + 3 * self.profile.call_s + exchanges + experts_s
            total += (exchanges + BACKWARD * experts_s) * backward
        return total

    def homes(self, method: str) -> list[Array]:
        """Where tokens are before every layer and at last, when their samples go."""
        return [self.home, *(self.next_home(device_TK, method) for device_TK in self.device)]

    def busiest(self, homes: list[Array]) -> int:
        """Hidden vectors through the busiest node of every exchange, in or out, of tokens that are there."""
        exchanges = [
            self.ports(device_TK, end_T)[-1].reshape(2, -1, self.cluster.devices_per_node).sum(axis=2).max()
            for device_TK, *ends in zip(self.device, homes, homes[1:], strict=False)
            for end_T in ends
        ]
        return int(sum(exchanges))

    def combined(self, homes: list[Array]) -> int:
        """Pairs of tokens and experts whose results the combines send to another node."""
        group = self.cluster.devices_per_node
        combines = zip(self.device, homes[1:], strict=True)
        return sum(int((device_TK // group != end_T[:, None] // group).sum()) for device_TK, end_T in combines)

    def copies(self, device_TK: Array, end_T: Array) -> float:
        """One exchange of hidden vectors between tokens' ends and the distinct devices of their experts."""
        return self.exchanged(self.ports(device_TK, end_T), self.sizes.hidden_size)

    def ports(self, device_TK: Array, end_T: Array) -> Array:
        """The copies of such an exchange through every device's ports, `[C, 2, D]`."""
        step_T = np.zeros(len(end_T), np.int64)
        found: Array = port_copies(
            remote_visits(device_TK, end_T), device_TK, end_T, step_T, num_steps=1, cluster=self.cluster
        )[0]
        return found

    def experts(self, device_TK: Array) -> float:
        """The busiest device's."""
        pairs = np.bincount(device_TK.ravel()).max()
        return float(self.profile.wait.seconds(self.sizes.start_s + self.sizes.pair_s * pairs))

    def attention(self, here_T: Array) -> float:
        """The busiest device's."""
        return float(self.sizes.attention_s * np.bincount(here_T).max())

    def padded_attention(self, here_T: Array) -> float:
        """The busiest device's of coherent tokens, which attend by sample, some at once and padded to the most."""
        queries_DI = np.zeros((self.cluster.num_devices, self.num_samples), np.int64)
        np.add.at(queries_DI, (here_T, np.arange(len(here_T)) * self.num_samples // len(here_T)), 1)
        return self.sizes.attention_s * max(map(attended, queries_DI))

    def next_home(self, device_TK: Array, method: str) -> Array:
        """Where each token's sample goes after a layer, `[T]`."""
        sample_T = np.arange(len(device_TK)) // (len(device_TK) // self.num_samples)
        copies_ID = np.zeros((self.num_samples, self.cluster.num_devices), np.int64)
        visited = np.zeros((len(device_TK), self.cluster.num_devices), bool)
        visited[np.arange(len(device_TK))[:, None], device_TK] = True
        np.add.at(copies_ID, sample_T, visited)
        pairs_I = np.bincount(sample_T) * device_TK.shape[1]
        found = netmoe.rehome(
            method, copies_ID, pairs_I, self.cluster, copy_bytes=4 * self.sizes.hidden_size, bounded=False
        )
        return found.device_of_sample[sample_T]

    def exchanged(self, rows_C2D: Array, width: int) -> float:
        """Seconds of an exchange of rows of float32, through every device's port and, between nodes, every node's."""
        group = self.cluster.devices_per_node
        node_2D = np.repeat(rows_C2D[-1].reshape(2, -1, group).sum(axis=2), group, axis=1)
        by_class = {
            "intra": (rows_C2D[0], lambda port, *_: self.profile.intra_s(port)),
            "inter": (node_2D, lambda port, *_: self.profile.inter_s(port)),
        }
        ports, curves = zip(*(by_class[name] for name in link_classes(self.cluster)), strict=True)
        return float(slowest(exchange_seconds(np.array(ports)[None, None], 4 * width, curves)).seconds[0, 0])


def attended(queries_I: Array) -> int:
    """Queries that a device computes for samples of so many, padding included."""
    count_C = torch.from_numpy(queries_I[queries_I > 0])
    return sum(len(run_b) * int(count_C[run_b].max()) for run_b in batches(count_C, count_C)) if len(count_C) else 0


def generated(steps: list[Predictor], *, coherent: bool) -> float:
    """Seconds of a generation from one token a sample, a `Predictor` a step; the first is the prompts'.

    Coherent steps but the first and the last tell the others K and V of all layers at once; the first layer by layer.
    Exchanges of next to nothing: two of contexts, one a gather, and three at the end, for tokens to go home.
    """
    if not coherent:
        return 2 * steps[0].profile.call_s + sum(step.standard() for step in steps)
    first, total, here_T = steps[0], 0.0, steps[0].home
    for ordinal, step in enumerate(steps):
        gathers = [step.rows(live_T) for live_T in step.lives(here_T)[:-1]]
        told = gathers if ordinal == 0 else [np.sum(gathers, axis=0)] * (ordinal + 1 < len(steps))
        total += sum(step.gather(rows_D) + step.profile.call_s for rows_D in told)
        total += step.through(here_T)
        here_T = step.lives(here_T)[-1]
    return total + 5 * first.profile.call_s


def devices_of(placement: Placement) -> Array:
    """The device of every expert, `[L, E]`; there are no replicas."""
    device_LE = np.empty((len(placement.physical_to_logical), placement.num_experts), np.int64)
    np.put_along_axis(device_LE, placement.physical_to_logical.astype(np.int64), placement.device_of_slot[None], axis=1)
    return device_LE


def training_seconds(profile: Profile, cluster: Cluster, one: Drift, way: str, trained: Trained) -> Array:
    """Seconds of a way's steps: experts, exchanges, what replicas and moves send, and small calls, `[R, 5]`."""
    found = []
    even = np.bincount(one.work.ids[one.work.tokens[-1], 0, 0], minlength=one.work.num_experts)
    for step in range(WARM, len(one.pairs)):
        parts = np.zeros(5)
        for layer, pairs_ED in enumerate(one.pairs[step]):
            if way == IDEAL:
                pairs_ED = np.repeat(even[:, None], cluster.num_devices, axis=1)
            holders = holders_in(trained.tables[step][layer], one.work.num_experts, cluster.devices_per_node)
            dealt_PD, busiest = quota.split(
                np.ascontiguousarray(pairs_ED, np.int64), holders, round(inter_ratio(cluster))
            )
            flow_DD = np.zeros((cluster.num_devices, cluster.num_devices))
            np.add.at(flow_DD, holders.device, dealt_PD)  # [to, from]
            exchange = exchange_s(profile, cluster, 4 * one.sizes.hidden_size * flow_DD.T)
            wait = float(profile.wait.seconds(np.array(one.sizes.start_s + one.sizes.pair_s * busiest)))
            parts[0] += (1 + BACKWARD) * wait
            parts[1] += 4 * exchange
            replicas = replica_flows(trained.tables[step][layer], trained.owners[step][layer])
            parts[2] += sum(2 * exchange_s(profile, cluster, 4 * one.sizes.expert_size * flow) for flow in replicas)
            if step + 1 < len(one.pairs):
                moved = np.zeros_like(flow_DD)
                before, after = trained.owners[step][layer], trained.owners[step + 1][layer]
                np.add.at(moved, (before, after), before != after)
                parts[3] += exchange_s(profile, cluster, STATE_BYTES * one.sizes.expert_size * moved)
            parts[4] += profile.call_s * (1 + (way not in (TODAY, IDEAL)))
        parts[3] += MOVE_CALLS * profile.call_s * bool(parts[3])
        parts[0] += one.sizes.attention_s * TOKENS * len(one.pairs[step])
        found.append(parts)
    return np.array(found)


def replica_flows(table: Array, owner: Array) -> list[Array]:
    """Rows, in parts, of a layer's replicas between devices `[from, to]`: from the owner, and among the others."""
    scatter, among = np.zeros((2, len(table), len(table)))
    for expert, home in enumerate(owner.tolist()):
        others = [device for device in np.flatnonzero((table == expert).any(axis=1)).tolist() if device != home]
        for device in others:
            scatter[home, device] += 1 / len(others)
            for other in others:
                among[device, other] += (other != device) / len(others)
    return [scatter, among]


def exchange_s(profile: Profile, cluster: Cluster, bytes_DD: Array) -> float:
    """Seconds of an exchange of bytes `[from, to]` between devices; 0 of none."""
    node_D = np.arange(cluster.num_devices) // cluster.devices_per_node
    apart = node_D[:, None] != node_D
    between = (bytes_DD * apart).reshape(cluster.num_nodes, cluster.devices_per_node, cluster.num_nodes, -1).sum((1, 3))
    inside = bytes_DD * (~apart & ~np.eye(cluster.num_devices, dtype=bool))
    if not between.any() and not inside.any():
        return 0.0
    inter = np.array([max(between.sum(0).max(), between.sum(1).max())])
    intra = np.array([max(inside.sum(0).max(), inside.sum(1).max())])
    return float(max(profile.inter_s(inter).seconds[0], profile.intra_s(intra).seconds[0]))
