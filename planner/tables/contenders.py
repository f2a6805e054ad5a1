"""The contenders of an evaluation side by side, as a table."""

from typing import TYPE_CHECKING

from ...runtime.plan import Contender, Part

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["contender_table", "legend", "megabytes"]

COLUMNS = (
    ("copies", "device_copies", ".2f"),
    ("nodes", "node_copies", ".2f"),
    ("kept", "hops_kept", ".1%"),
    ("on node", "node_hops_kept", ".1%"),
    ("balance (p95)", "balance", "balance"),
    ("MB", "intra_bytes", "MB"),
    ("inter", "inter_bytes", "MB"),
    ("K/V", "kv_bytes", "MB"),
)


def contender_table(part: Part, title: str, *, several_nodes: bool) -> "Table":
    """Contenders side by side; columns that somebody has a metric for, those of nodes where there are several."""
    from rich.table import Table

    hidden = () if several_nodes else ("node_copies", "node_hops_kept", "inter_bytes")
    columns = [
        column
        for column in COLUMNS
        if column[1] not in hidden and any(column[1] in contender.metrics for contender in part.contenders)
    ]
    gap = 1 if several_nodes else 2  # more columns must fit 80 signs
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="")
    table.add_column(title, no_wrap=True)
    for header, *_ in columns:
        table.add_column(header, justify="right")
    for contender in part.contenders:
        cells = [_cell(contender, name, form) for _, name, form in columns]
        table.add_row(f"{contender.name}, {contender.dispatch_model}", *cells)
    return table


def legend(part: Part, *, several_nodes: bool) -> str:
    """What the columns of the table say, those that it has."""
    found = {name for contender in part.contenders for name in contender.metrics}
    nodes, on_node = (" (nodes: nodes)", " (on node: node)") if several_nodes else ("", "")
    words = []
    if "device_copies" in found:
        words.append(f"copies: hidden vectors to other devices{nodes}, a token and layer")
    if "hops_kept" in found:
        words.append(f"kept: hops that stay on the device{on_node}")
    words.append("balance: busiest device over the mean, over layers and steps (95th percentile)")
    if "intra_bytes" in found:
        inside = " inside nodes, between nodes (inter)" if several_nodes else ""
        words.append(f"MB a step: hidden vectors{inside}{', K and V' if 'kv_bytes' in found else ''}")
    return "; ".join(words)


def megabytes(value: float) -> str:
    """Bytes in MB, three digits or whole."""
    return f"{value / 1e6:.3g}" if value < 1e9 else f"{value / 1e6:,.0f}"


def _cell(contender: Contender, name: str, form: str) -> str:
    metric = contender.metrics.get(name)
    if metric is None:
        return "-"
    if form == "balance":
        p95 = contender.metrics.get("balance_p95")
        return f"{metric.value:.2f} ({p95.value:.2f})" if p95 else f"{metric.value:.2f}"
    if form == "MB":
        return megabytes(metric.value)
    return f"{metric.value:{form}}"
