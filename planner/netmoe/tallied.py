"""The tally of a cohort whose samples have known homes before and after every layer: what its exchanges carry.

Legend: I samples; L MoE layers; C link classes; D devices; N nodes; B steps.
"""

import numpy as np
from numpy.typing import NDArray

from ...profilers.cluster import Cluster
from ...solvers.ports import CLASSES, link_classes, sample_copies
from ..measures.survey import Cohort
from ..measures.tally import COUNTS, Ports, Tally
from .counted import SampleTraffic
from .roll import Roll

__all__ = ["tallied"]

Numbers = NDArray[np.int64]


def tallied(
    roll: Roll, traffic: SampleTraffic, place: Numbers, cohort: Cohort, device_LI: Numbers, cluster: Cluster
) -> Tally:
    """What the samples of complete steps send, by step.

    Parameters
    ----------
    place
        Of the cohort's samples in the roll, `[I]`.
    device_LI
        Where they are when each layer begins and after the last, `[L+1, I]`.
    """
    assert cohort.step is not None
    order = np.argsort(cohort.step, kind="stable")[np.count_nonzero(cohort.step < 0) :]
    place, step, device_LI = place[order], cohort.step[order], device_LI[:, order]
    first_B = np.searchsorted(step, np.arange(cohort.num_steps))
    num_steps, num_layers = cohort.num_steps, traffic.copies.shape[1]
    tally = Tally(
        np.zeros((num_steps, len(COUNTS)), np.int64),
        np.zeros((num_steps, num_layers, cluster.num_devices), np.int64),
        traffic.placement.slots,
        Ports.empty("migrating", num_steps, num_layers, cluster),
        np.zeros((cluster.num_devices, cluster.num_devices), np.int64),
    )
    assert tally.ports is not None
    assert tally.between is not None
    classes = [CLASSES.index(link) for link in link_classes(cluster)]
    column = {name: tally.counts[:, index] for index, name in enumerate(COUNTS)}
    column["tokens"] += np.add.reduceat(roll.tokens[place], first_B)
    for layer in range(num_layers):
        tally.loads[:, layer] = np.add.reduceat(traffic.pairs[place, layer], first_B, dtype=np.int64)
        np.add.at(tally.ports.tokens[:, layer], (step, device_LI[layer]), roll.tokens[place])
        np.add.at(tally.ports.contexts[:, layer], (step, device_LI[layer]), roll.contexts[place])
        dispatch_BC2D, combine_BC2D = tally.ports.dispatch[:, layer], tally.ports.combine[:, layer, :, ::-1]
        exchanges = (
            (device_LI[layer], dispatch_BC2D, tally.between),
            (device_LI[layer + 1], combine_BC2D, tally.between.T),
        )
        for device_I, ports_BC2D, pairs_DD in exchanges:
            np.add.at(pairs_DD, device_I, traffic.copies[place, layer])
            ports_BC2D += sample_copies(traffic.copies[place, layer], device_I, cluster, first_B)[:, classes]
            nodes_IN = traffic.nodes[place, layer].astype(np.int64)
            own_I = nodes_IN[np.arange(len(place)), device_I // cluster.devices_per_node]
            column["node_copies"] += np.add.reduceat(nodes_IN.sum(axis=1) - own_I, first_B)
    np.fill_diagonal(tally.between, 0)
    for exchange in (tally.ports.dispatch, tally.ports.combine):
        sent_BC = exchange[:, :, :, 0].sum(axis=(1, 3))
        column["device_copies"] += sent_BC.sum(axis=1)
        if cluster.num_nodes > 1:
            column["far_copies"] += sent_BC[:, -1]
    return tally
