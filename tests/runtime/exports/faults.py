"""Faults of files for engines, by engine and name: the change that makes one, and what is to be said of it.

The sound files are of 3 MoE layers behind a dense one, before one of MTP; 8 experts in 12 slots on 4 devices.
"""

from collections.abc import Callable
from typing import Any

Change = Callable[[Any], Any]


def rows(value: Any) -> list[Any]:
    """The rows of a file, or of one of its layers the lists of experts, to change in place."""
    if isinstance(value, list):
        return value
    if "layer_list" in value:
        return [device["device_expert"] for device in value["layer_list"][1]["device_list"]]
    held = value.get("physical_to_logical_map", value.get("initial_global_assignments"))
    return held if isinstance(held, list) else list(held.values())


def put(index: int, item: Any) -> Change:
    def change(value: Any) -> None:
        rows(value)[1][index] = item

    return change


def again(value: Any) -> None:
    """Put an expert twice on a device, and nothing else: the second replaces one that is elsewhere, too."""
    row = next(row for row in rows(value) if len(row) > 2)
    row[1] = row[0]


ROWS: dict[str, tuple[Change, str]] = {  # of every engine that takes placements
    "a slot too few": (lambda value: rows(value)[1].pop() and None, "slots|devices hold"),
    "a slot too many": (lambda value: rows(value)[1].append(0), "slots|devices hold"),
    "a negative id": (put(0, -1), "names expert -1; expected 0 to 7"),
    "an id of no expert": (put(0, 8), "names expert 8"),
    "an id beyond all numbers": (put(0, 10**40), "out of all range"),
    "a fraction": (put(0, 1.0), "holds 1.0; expected the id"),
    "a truth": (put(0, True), "holds True; expected the id"),
    "a list in a row": (put(0, [1]), "holds a list of 1"),
    "an expert twice on a device": (again, "twice; the second"),
}

SGLANG: dict[str, tuple[Change, str]] = {
    "an extra key": (lambda value: value.update(metadata={}), "1 too many"),
    "another key": (lambda value: {"physical_to_logical": value["physical_to_logical_map"]}, "without the key"),
    "only the MoE layers": (lambda value: value["physical_to_logical_map"].pop(0) and None, "4 rows, one a hidden"),
    "the MTP layer": (lambda value: value["physical_to_logical_map"].append([0] * 12), "list of 4 rows"),
    "an object of rows": (lambda _: {"physical_to_logical_map": {"0": []}}, "is an object of 1; expected a list"),
    "a row of nothing": (lambda value: value["physical_to_logical_map"].__setitem__(2, None), "None; expected a list"),
    "no redundant slots": (lambda _: {"physical_to_logical_map": [list(range(8))] * 4}, "8 slots; expected 12"),
}
VLLM: dict[str, tuple[Change, str]] = {
    "a layer too few": (lambda value: value.pop() and None, "expected a list of 3 rows"),
    "a layer too many": (lambda value: value.append(value[0]), "expected a list of 3 rows"),
    "a short row for all": (lambda _: list(range(8)), "8 slots; expected 12"),
    "a row for all without expert 7": (lambda _: [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4], "leaves out expert 7"),
    "a row of nothing": (lambda value: value.__setitem__(2, None), "None; expected a list"),
    "a number": (lambda _: 7, "7; expected a list"),
}
TENSORRT_LLM: dict[str, tuple[Change, str]] = {
    "an extra key": (lambda value: value.update(ep_size=4), "expected exactly num_slots"),
    "no slots named": (lambda value: value.pop("num_slots") and None, "expected exactly num_slots"),
    "slots as text": (lambda value: value.update(num_slots="12"), "num_slots '12'"),
    "slots beyond all numbers": (lambda value: value.update(num_slots=10**40), "num_slots a number out of all range"),
    "moving layers": (lambda value: value.update(layer_updates_per_iter=2), "moves experts off the plan"),
    "no rows": (lambda value: value.update(initial_global_assignments=None), "expected an object of rows"),
    "a list of rows": (lambda value: value.update(initial_global_assignments=[]), "expected an object of rows"),
    "without MTP": (lambda value: value["initial_global_assignments"].pop(4) and None, "without hidden layer 4"),
    "a dense layer": (
        lambda value: value["initial_global_assignments"].__setitem__(0, [*range(8), 0, 1, 2, 3]),
        "hidden layer 0 has no experts",
    ),
    "layers as text": (
        lambda value: value.update(
            initial_global_assignments={str(k): v for k, v in value["initial_global_assignments"].items()}
        ),
        "layer '1' .4 such.",
    ),
    "a list": (lambda value: [value], "expected exactly"),
}


def _layer(key: str, item: Any) -> Change:
    return lambda value: value["layer_list"][1].__setitem__(key, item)


ASCEND: dict[str, tuple[Change, str]] = {
    "a layer too few": (lambda value: value["layer_list"].pop() and None, "2 layers; expected 3"),
    "another count": (lambda value: value.update(moe_layer_count=2), "moe_layer_count 2"),
    "the MTP layer": (lambda value: value["layer_list"].append(value["layer_list"][0]), "4 layers; expected 3"),
    "no layers": (lambda value: value.pop("layer_list") and None, "without layer_list"),
    "hidden layers": (_layer("layer_id", 2), "layer_id 2; expected 1"),
    "another number of devices": (_layer("device_count", 5), "device_count 5 and 4 devices"),
    "a device too few": (lambda value: value["layer_list"][1]["device_list"].pop() and None, "3 devices; expected 4"),
    "no devices": (_layer("device_list", None), "without device_list"),
    "devices out of place": (lambda value: value["layer_list"][1]["device_list"].reverse(), "device_id 3 in place 0"),
    "a device of nothing": (
        lambda value: value["layer_list"][1]["device_list"].__setitem__(0, None),
        "device 0 has no list",
    ),
    "a layer of nothing": (lambda value: value["layer_list"].__setitem__(0, None), "layer 0: None"),
    "a list": (lambda value: value["layer_list"], "without layer_list"),
}
TUTEL: dict[str, tuple[Change, str]] = {
    f"degree {degree!r}": (lambda value, degree=degree: value["a2a_ffn_overlap_degree"].__setitem__(1, degree), said)
    for degree, said in (
        (0, "degree 0; expected 1 to 32"),
        (33, "degree 33"),
        (10**40, "out of all range"),
        (2.0, "degree 2.0"),
        (True, "degree True"),
        (None, "degree None"),
        ({}, "degree an object"),
    )
} | {
    "a layer too few": (lambda value: value["a2a_ffn_overlap_degree"].pop() and None, "2 degrees; expected 3"),
    "a layer too many": (lambda value: value["a2a_ffn_overlap_degree"].append(1), "4 degrees; expected 3"),
    "another key": (lambda _: {"degrees": [1, 2, 4]}, "expected an object with a list"),
    "an extra key": (lambda value: value.update(layers=3), "nothing else"),
    "one number": (lambda _: {"a2a_ffn_overlap_degree": 2}, "expected an object with a list"),
    "a list": (lambda value: value["a2a_ffn_overlap_degree"], "expected an object with a list"),
    "a number": (lambda _: 2, "2; expected an object"),
}
FAULTS: dict[str, dict[str, tuple[Change, str]]] = {
    "sglang": ROWS | SGLANG,
    "vllm": ROWS | VLLM,
    "tensorrt-llm": ROWS | TENSORRT_LLM,
    "vllm-ascend": ROWS | ASCEND,
    "tutel": TUTEL,
}
