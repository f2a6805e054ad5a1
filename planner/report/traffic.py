"""Picture of what contenders send between all pairs of devices.

Legend: D devices.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ...profilers.cluster import Cluster
from ...runtime.plan import Part
from ...solvers.arrays import Bools, Floats
from ..document import Column, Section, Table, Text
from ..evaluate.metrics import FAR_BYTES, KV_BYTES, NEAR_BYTES
from ..evaluate.tally import Tally
from ..figures import contender_of, figure_of, megabytes
from ..picture import Axis, Heat, group_size, grouped, ordinals
from .pictures import alike, names_of

PAIRS = "colour: {} per step from the row's device to the column's, dispatch and combine of all MoE layers"
GATHERED = "K and V, which coherent dispatch gathers from every device to all others, are not in the colours"


def traffic_section(
    part: Part, tallies: Mapping[str, Tally], labels: Sequence[str], today: str, cluster: Cluster
) -> Section | None:
    """Bytes between all pairs of devices, or copies where sizes are unknown, of every label in one colour scale.

    Totals inside nodes and between them are the evaluation's, of all tokens; who sends whom is that of complete steps.
    """
    sized = all(FAR_BYTES in contender_of(part, label).metrics for label in labels)
    node_D = np.arange(cluster.num_devices) // cluster.devices_per_node
    far_DD, shown, names = node_D[:, None] != node_D, dict[str, Floats](), names_of(part, today)
    for label in labels:
        copies_DD = tallies[label].between_per_step
        if copies_DD is None:
            return None
        shown[label] = _bytes(part, label, copies_DD, far_DD) if sized else copies_DD
    unit, text = ("MB", megabytes) if sized else ("copies", "{:,.0f}".format)
    busiest = [(one, np.unravel_index(int(one.argmax()), one.shape)) for one in shown.values()]
    columns = [
        Column("", [names[label] for label in shown]),
        Column(f"{unit} per step", [text(float(one.sum())) for one in shown.values()]),
        Column("between nodes", [text(float(one[far_DD].sum())) for one in shown.values()]),
        Column("most", [f"{text(float(one.max()))}, {a} to {b}" for one, (a, b) in busiest]),
    ]
    gathered, lines = [contender_of(part, label).metrics.get(KV_BYTES) for label in shown], [PAIRS.format(unit)]
    if any(gathered):
        lines.append(GATHERED)
        columns.append(Column("MB of K and V", ["-" if one is None else megabytes(one.value) for one in gathered]))
    groups = alike(shown)
    size = group_size(cluster.num_devices, len(groups))
    if size > 1:
        lines.append(f"rows and columns are groups of {size} devices")
    tables = {", ".join(names[one] for one in labels): grouped(shown[labels[0]], size) for labels in groups}
    heats = _heats(tables, cluster, size, f"{unit} per step", 1e6 if sized else 1.0)
    title = f"{'Bytes' if sized else 'Copies'} between devices"
    return Section(title, (Text.of(*lines), *heats, Table(columns)))


def _bytes(part: Part, label: str, copies_DD: Floats, far_DD: Bools) -> Floats:
    """Bytes of each pair: the totals between and inside nodes, shared by copies; none where there are none."""
    bytes_DD = np.zeros(copies_DD.shape)
    for name, mask_DD in ((FAR_BYTES, far_DD), (NEAR_BYTES, ~far_DD)):
        if total := copies_DD[mask_DD].sum():
            bytes_DD[mask_DD] = copies_DD[mask_DD] * (figure_of(contender_of(part, label), name) / total)
    return bytes_DD


def _heats(tables: Mapping[str, Floats], cluster: Cluster, size: int, unit: str, scale: float) -> list[Heat]:
    """Maps of groups of so many devices by title, in one colour scale, with lines between nodes."""
    nodes = [at / size for at in range(cluster.devices_per_node, cluster.num_devices, cluster.devices_per_node)]
    ticks, top = [*ordinals(-(-cluster.num_devices // size), size)], max(float(one.max()) for one in tables.values())
    x, y = Axis("to device", ticks=ticks), Axis("from device", ticks=ticks)
    return [Heat(title, one / scale, top / scale, x, y, unit, nodes) for title, one in tables.items()]
