"""Tutel: `a2a_ffn_overlap_degree`, into how many chunks a layer is cut so that its exchange and experts overlap."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from ...errors import UsageError
from ...files import read_json
from ...solvers.replicas import ReplayRule
from ...traces.model import ModelSpec
from ..plan import Plan
from .engine import MAX_BYTES, PERMUTE, Expected, Exported, Lack, shown

KEY = "a2a_ffn_overlap_degree"
HIGHEST = 32
CONDITIONS = (
    "Tutel pads each layer's capacity to a multiple of its degree, which is at most 32",
    "the degree is ignored on CPU tensors and with adaptive_r 0, where there is no exchange",
    "a layer keeps the last degree it was given; one degree serves forward and backward, and unequal chunks of the plan"
    " are equal ones here",
)
PLACED = f"the plan's placement is not in the file: Tutel's ranks hold experts in order; {PERMUTE}"


class Tutel:
    """Degrees of the MoE layers by ordinal; placements go by a permuted checkpoint."""

    name = "tutel"
    version = "ac0e51b"
    replica_rule: ReplayRule | None = None
    splits: Mapping[str, str] = MappingProxyType({})
    fills = False
    file = "degrees.json"
    carries = frozenset({"pipeline"})
    trains = True
    lacks: tuple[Lack, ...] = ()
    runs_on = ""

    def export(self, plan: Plan, model: ModelSpec, directory: Path, rule: str | None) -> Exported:
        """The degrees, and the line that hands them to each layer."""
        del model
        degrees = plan.options.get("pipeline", {}).get(KEY)
        if plan.decisions.pipeline is None or degrees is None:
            decided = " and ".join(plan.decisions.names) or "nothing"
            raise UsageError(
                f"{self.name} takes pipeline degrees, and the plan decides {decided}; make one with moeplan solve"
                " --strategy pipemoe"
            )
        text = json.dumps({KEY: list(degrees)}) + "\n"
        line = (
            f"import json, pathlib; degrees = json.loads(pathlib.Path({str(directory / self.file)!r}).read_text())"
            f"[{KEY!r}]  # then, in MoE layer l of the model: moe_layer(x, {KEY}=degrees[l])"
        )
        placed = (PLACED,) if plan.decisions.placement is not None else ()
        return Exported({self.file: text}, line, CONDITIONS + placed)

    def findings(self, path: Path, expected: Expected) -> Iterator[str]:
        """Faults that Tutel's assertions would stop at."""
        value = read_json(path, what="degrees of Tutel", max_bytes=MAX_BYTES)
        degrees = value.get(KEY) if isinstance(value, dict) else None
        if not isinstance(value, dict) or set(value) != {KEY} or not isinstance(degrees, list):
            yield f"{shown(value)}; expected an object with a list {KEY} and nothing else"
            return
        if len(degrees) != expected.model.num_layers:
            yield f"{len(degrees)} degrees; expected {expected.model.num_layers}, one an MoE layer"
        for layer, degree in enumerate(degrees):
            if type(degree) is not int or not 1 <= degree <= HIGHEST:
                yield f"layer {layer}: degree {shown(degree)}; expected 1 to {HIGHEST}"
