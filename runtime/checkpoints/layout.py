"""Names of the parts of a layer of experts in a checkpoint, and the effect of a permutation on each tensor.

A name is `{stem}.{layer}.{block}.{inner}`: the stem ends in "layers" and comes before every layer of the model's text
part, the block is the module that holds a layer's router and experts, "mlp" in most families.

A header is read again whenever it is needed: those of a large checkpoint together would take hundreds of megabytes.

Legend: E experts per layer.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NoReturn

from ...errors import InputError
from .header import Tensor, read_header
from .permutation import Permutation

NAME = re.compile(r"((?:[\w-]+\.)*?layers)\.(0|[1-9]\d{0,4})\.([a-z]\w*)\.(.+)", re.ASCII)
EXPERT = re.compile(r"experts\.(0|[1-9]\d{0,4})(?=\.|$)(?:\.(\w+))?", re.ASCII)
FUSED = r"experts\.(?:gate_up_proj|gate_proj|up_proj|down_proj|w13|w[123])(?:[._][a-z]\w*)*"
GRANITE = "block_sparse_moe"  # whose experts are called as layers of a dense model's MLP may be


class Role(StrEnum):
    """The effect of a permutation on a tensor."""

    STAYS = "stays"
    RENAMED = "renamed"  # an expert's own: its number in the name changes
    ROWS = "rows"  # [E, ...]: the rows are put into the new order
    IDS = "ids"  # its values are numbers of experts, of old ones


ID_TYPES = {"I64": "<i8", "I32": "<i4", "U64": "<u8", "U32": "<u4"}  # as numpy calls those wide enough
RULES = (  # of inner names; what fits none is refused
    (re.compile(r"shared.+"), Role.STAYS),
    (re.compile(EXPERT.pattern + r".*", re.ASCII), Role.RENAMED),
    (re.compile(FUSED, re.ASCII), Role.ROWS),
    (re.compile(r"(?:input|output)_linear\.weight"), Role.ROWS),
    (re.compile(r"(?:gate|router)\.(?:(?:layer|wg)\.)?(?:weight|bias)"), Role.ROWS),
    (re.compile(r"(?:(?:gate|router|moe_statics)\.)?(?:e_score_correction_bias|expert_bias)"), Role.ROWS),
    (re.compile(r"(?:gate|router)\.tid2eid"), Role.IDS),
)
Blocks = Mapping[str, Mapping[int, set[str]]]  # stem -> layer -> the modules that hold experts


@dataclass(frozen=True)
class Layout:
    """Places of a permutation's layers among a checkpoint's tensors."""

    stem: str  #: What comes before the number of a hidden layer
    blocks: Mapping[int, str]  #: For each layer of the permutation, the module that holds its router and experts
    outside: frozenset[str]  #: "stem.layer" of the layers of experts that the permutation leaves alone
    num_experts: int

    def place(self, name: str) -> tuple[int, str] | None:
        """The layer and the inner name of a tensor in a block of the permutation's layers, None for all others."""
        match = NAME.fullmatch(name)
        if match is None and _is_expert_valued(name) and "mtp" not in name:
            self._refuse(name, "mentions experts or a router outside of the layers")
        if match is None or match[1] != self.stem or int(match[2]) not in self.blocks:
            return None
        if match[3] == self.blocks[int(match[2])]:
            return int(match[2]), match[4]
        if _is_expert_valued(name):
            self._refuse(name, "mentions experts or a router beside the block of its layer that holds them")
        return None

    def role(self, name: str, tensor: Tensor) -> Role:
        """The effect of a permutation on a tensor.

        Raises
        ------
        InputError
            The tensor is of a layer's router or experts, and it cannot be told what becomes of it.
        """
        place = self.place(name)
        if place is None:
            return Role.STAYS
        role = next((role for rule, role in RULES if rule.fullmatch(place[1])), None)
        if role is None:
            self._refuse(name, "is no part of a layer of experts that is known here")
        if role is Role.ROWS and place[1].startswith("experts.") and tensor.shape in ((), (1,)):
            return Role.STAYS  # one number for all experts
        if role is Role.ROWS and not self._has_rows(tensor):
            self._refuse(name, f"has shape {list(tensor.shape)}, where {self.num_experts} experts were expected first")
        if role is Role.IDS and tensor.dtype not in ID_TYPES:
            self._refuse(name, f"numbers experts by {tensor.dtype}, where {' or '.join(ID_TYPES)} was expected")
        return role

    def renamed(self, name: str, permutation: Permutation) -> str:
        """The name of a tensor, or of a module of an expert, in the permuted checkpoint."""
        match = NAME.fullmatch(name) if "experts." in name else None
        expert = match and EXPERT.match(match[4])
        if not match or not expert or _is_ahead(match[1]) or f"{match[1]}.{match[2]}" in self.outside:
            return name
        new_E = permutation.new.get(int(match[2]), ())
        if int(expert[1]) >= len(new_E):
            return name
        start, end = match.start(4) + expert.start(1), match.start(4) + expert.end(1)
        return f"{name[:start]}{new_E[int(expert[1])]}{name[end:]}"

    def _has_rows(self, tensor: Tensor) -> bool:
        """Check whether the first axis that is longer than 1 is that of the experts, in whole bytes an expert."""
        axes = [size for size in tensor.shape if size > 1] if self.num_experts > 1 else [1]
        return axes[:1] == [self.num_experts] and (tensor.end - tensor.begin) % self.num_experts == 0

    def _refuse(self, name: str, reason: str) -> NoReturn:
        raise InputError(f"{name[:120]} {reason}; a permuted checkpoint with it as it is would be wrong")


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
            if match and _holds_experts(match[3], match[4]):
                blocks[match[1]][int(match[2])].add(match[3])
    return blocks


def _stem(folder: Path, blocks: Blocks, layers: Collection[int]) -> str:
    """Prefix of the names of the layers; layers that predict further tokens have other numbers."""
    stems = [stem for stem in blocks if not _is_ahead(stem)]
    complete = [stem for stem in stems if blocks[stem].keys() >= set(layers)]
    if len(complete) == 1:
        return complete[0]
    if complete:
        raise InputError(f"{folder}: layers of experts under {' and '.join(sorted(complete))}; expected one model")
    most = max((set(blocks[stem]) for stem in stems), key=len, default=set())
    absent = sorted(set(layers) - most)
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
    for (layer, part), numbers in experts.items():
        if wrong := sorted(numbers.symmetric_difference(range(layout.num_experts))):
            lack = "lacks" if wrong[0] not in numbers else "has"
            raise InputError(
                f"{folder}: hidden layer {layer} {lack} {part} of expert {wrong[0]};"
                f" expected experts 0 to {layout.num_experts - 1}"
            )
    if absent := sorted(layout.blocks.keys() - routed):
        raise InputError(f"{folder}: no router of hidden layer {absent[0]} under a name known here; expected one")


def _holds_experts(block: str, inner: str) -> bool:
    """Check whether a tensor of this name is of routed experts."""
    return inner.startswith("experts.") or (block == GRANITE and inner.startswith(("input_linear.", "output_linear.")))


def _is_ahead(stem: str) -> bool:
    """Check whether layers of this stem predict further tokens (MTP): no layer of theirs is in a plan."""
    return "mtp" in stem.split(".")


def _is_expert_valued(name: str) -> bool:
    """Check whether a tensor whose place is not known may be of routed experts, by what its name says."""
    return ("expert" in name or "router" in name) and "shared" not in name
