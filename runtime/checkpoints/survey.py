"""What a checkpoint's headers say of its layers of experts, looked through before anything is written.

A header is read again whenever it is needed: those of a large checkpoint together would take hundreds of megabytes.

Legend: E experts a layer.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from ...errors import InputError
from .header import read_header
from .layout import EXPERT, NAME, Layout, Role, holds_experts, is_ahead

__all__ = ["survey"]

Blocks = Mapping[str, Mapping[int, set[str]]]  # stem -> layer -> the modules that hold experts


def survey(shards: Sequence[Path], layers: Collection[int], num_experts: int) -> Layout:
    """The layout of the checkpoint in these files.

    Parameters
    ----------
    layers
        The hidden layers to permute.

    Raises
    ------
    InputError
        A layer, an expert or a router is missing, or a tensor of a layer is of no known kind or shape.
    """
    folder, blocks = shards[0].parent, _blocks(shards)
    stem = _stem(folder, blocks, layers)
    for layer in layers:
        if len(blocks[stem][layer]) > 1:
            names = " and ".join(sorted(blocks[stem][layer]))
            raise InputError(f"{folder}: hidden layer {layer} has experts in {names}; expected one module of them")
    ours = {f"{stem}.{layer}" for layer in layers}
    outside = {f"{other}.{layer}" for other in blocks for layer in blocks[other]} - ours
    layout = Layout(stem, {layer: min(blocks[stem][layer]) for layer in layers}, frozenset(outside), num_experts)
    _check(shards, layout)
    return layout


def _blocks(shards: Sequence[Path]) -> Blocks:
    blocks: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for shard in shards:
        for name in read_header(shard).tensors:
            match = NAME.fullmatch(name)
            if match and holds_experts(match[3], match[4]):
                blocks[match[1]][int(match[2])].add(match[3])
    return blocks


def _stem(folder: Path, blocks: Blocks, layers: Collection[int]) -> str:
    """What the names of the layers begin with; layers that predict further tokens have other numbers."""
    found = [stem for stem in blocks if not is_ahead(stem)]
    complete = [stem for stem in found if blocks[stem].keys() >= set(layers)]
    if len(complete) == 1:
        return complete[0]
    if complete:
        raise InputError(f"{folder}: layers of experts under {' and '.join(sorted(complete))}; expected one model")
    there = max((set(blocks[stem]) for stem in found), key=len, default=set())
    absent = sorted(set(layers) - there)
    raise InputError(
        f"{folder}: no experts of hidden layer {absent[0]} under a name known here ({len(absent)} of {len(layers)}"
        " layers of the plan have none); expected the model that the plan is of"
    )


def _check(shards: Sequence[Path], layout: Layout) -> None:
    """Refuse a layer without a router, and experts that are not all there."""
    experts: dict[tuple[int, str], set[int]] = defaultdict(set)
    routed: set[int] = set()
    for shard in shards:
        for name, tensor in read_header(shard).tensors.items():
            try:
                role, place = layout.role(name, tensor), layout.place(name)
            except InputError as error:
                raise InputError(f"{shard}: {error}") from error
            expert = place and EXPERT.match(place[1])
            if place and expert:
                experts[place[0], expert[2] or ""].add(int(expert[1]))
            elif place and role is Role.ROWS and place[1].startswith(("gate.", "router.")):
                routed.add(place[0])
    folder = shards[0].parent
    for (layer, part), there in experts.items():
        if wrong := sorted(there.symmetric_difference(range(layout.num_experts))):
            lack = "lacks" if wrong[0] not in there else "has"
            raise InputError(
                f"{folder}: hidden layer {layer} {lack} {part} of expert {wrong[0]};"
                f" expected experts 0 to {layout.num_experts - 1}"
            )
    if absent := sorted(layout.blocks.keys() - routed):
        raise InputError(f"{folder}: no router of hidden layer {absent[0]} under a name known here; expected one")
