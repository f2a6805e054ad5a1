"""The bytes between every pair of devices under each contender of a comparison, as a page.

Legend: D devices.
"""

import os
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from ...files import check_target
from ..compare.comparison import Comparison
from ..document import drawn, write_page

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = ["check_matrices", "write_matrices"]


def check_matrices(path: str | os.PathLike[str]) -> None:
    """Refuse a page of another name, or one that cannot be written."""
    if not str(path).endswith(".html"):
        raise UsageError(f"-o {path}; expected a page of the bytes between devices: name it .html")
    check_target(path)


def write_matrices(found: Comparison, path: str | os.PathLike[str]) -> None:
    """Write the matrices of a comparison as a page, all in one colour scale.

    Raises
    ------
    StorageError
        It cannot be written.
    """
    scale, unit = (1.0, "copies") if found.copy_bytes is None else (found.copy_bytes / 1e6, "MB")
    shown = {label: copies_DD * scale for label, copies_DD in found.between.items()}
    highest = max((float(one_DD.max()) for one_DD in shown.values()), default=0.0)
    sections = [
        drawn(label.replace("/", ", "), _words(one_DD, unit, found), _drawn(one_DD, unit, highest))
        for label, one_DD in shown.items()
    ]
    text = f"{unit} a step from device to device, dispatch and combine of all MoE layers; {found.cluster}, mean of"
    write_page(path, "What goes between devices", f"{text} {found.part.num_steps} step(s).", sections)


def _words(between_DD: NDArray[np.float64], unit: str, found: Comparison) -> str:
    """How much in all, between nodes, and over the busiest pair."""
    node_D = np.arange(len(between_DD)) // found.cluster.devices_per_node
    far = float(between_DD[node_D[:, None] != node_D].sum())
    source, target = np.unravel_index(int(between_DD.argmax()), between_DD.shape)
    return (
        f"{between_DD.sum():.4g} {unit} a step, {far:.4g} of them between nodes; most from {source} to {target}:"
        f" {between_DD.max():.4g}."
    )


def _drawn(between_DD: NDArray[np.float64], unit: str, highest: float) -> "Figure":
    import plotly.graph_objects as go

    heat = go.Heatmap(z=between_DD, zmin=0.0, zmax=highest, colorscale="Blues", colorbar={"title": f"{unit} a step"})
    axes = {"xaxis": {"title": "to device"}, "yaxis": {"title": "from device", "autorange": "reversed"}}
    return go.Figure(heat).update_layout(**axes)
