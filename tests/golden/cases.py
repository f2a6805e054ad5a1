"""The table of what is solved and compared; a trace, a profile or another case's plan goes by its name.

Together they take every strategy, method, dispatch model and form of trace, and every flag of solve and of compare that
changes a plan or a figure.
"""

from typing import Any

from moeplan.planner.evaluate.step_size import StepSize

SMALL: dict[str, Any] = {"experts": 8, "layers": 3}
STEPS: dict[str, Any] = {"form": "counts", "columns": ("step",), "samples": 240}

# Settings of `routing.write_trace`.
TRACES: dict[str, dict[str, Any]] = {
    "chat": {"samples": 128},
    "drifted": {"seed": 1, "chains": 1},
    "ranked": {"seed": 2, "columns": ("sample", "step", "source_rank"), "unrouted": 0.05},
    "bare": {"seed": 3, "columns": (), "top_k": 3},
    "grouped": {"seed": 4, "groups": 8},
    "training": {"seed": 5, "training": True, **SMALL},
    "run": {"seed": 8, "training": True, "columns": ("step", "source_rank"), "samples": 320, **SMALL},
    "small": {"seed": 6, **SMALL},
    "single": {"seed": 7, "top_k": 1, **SMALL},
    "steps": STEPS,
    "other-steps": {"seed": 1, "chains": 1, **STEPS},
    "samples": {"form": "counts", "length": 24},
    "other-samples": {"form": "counts", "length": 24, "seed": 1},
}


def _solve(strategy: str, trace: str, **settings: Any) -> dict[str, Any]:
    """Settings of a `Request`; links are of the cluster, 2x2 without, `profile` is whether there is one of that.

    Without a size or a purpose steps are of four samples a device.
    """
    return {"strategy": strategy, "trace": trace, **settings}


SOLVES: dict[str, dict[str, Any]] = {
    "exflow-coherent": _solve("exflow", "chat"),
    "exflow-copies": _solve("exflow", "chat", profile=True, objective="copies", max_load=1.4, seed=3),
    "exflow-standard": _solve("exflow", "chat", dispatch_model="standard", links=("intra=1:5", "inter=0.5:50")),
    "exflow-replicas": _solve("exflow", "ranked", dispatch_model="standard", slots=5, profile=True),
    "exflow-expected": _solve("exflow", "bare", cluster="4x1", redundant=4),
    "exflow-whole": _solve("exflow", "grouped", dispatch_model="standard", groups="whole"),
    "exflow-thorough": _solve("exflow", "small", cluster="1x4", method="sweeps", bound="thorough", fit_fraction=1.0),
    "exflow-ilp": _solve("exflow", "single", cluster="1x2", method="ilp", phases=("decode",)),
    "exflow-paper": _solve("exflow", "small", method="paper"),
    "exflow-replan": _solve("exflow", "drifted", previous="exflow-coherent", horizon=1e6),
    "exflow-fp8": _solve("exflow", "chat", profile=True, wire="fp8"),
    "pipemoe-fp8": _solve("pipemoe", "chat", on="exflow-fp8"),
    "pipemoe-exact": _solve("pipemoe", "training", joint=True, full_duplex=True),
    "pipemoe-paper": _solve("pipemoe", "chat", on="eplb-refined", method="paper", max_degree=6),
    "pipemoe-robust": _solve("pipemoe", "chat", on="exflow-standard", method="robust"),
    "pipemoe-unequal": _solve("pipemoe", "training", method="unequal", samples_per_step=5),
    "pipemoe-capacity": _solve("pipemoe", "ranked", capacity_factor=1.25, phases=("prefill",)),
    "netmoe-tried": _solve("netmoe", "ranked", profile=True),
    "netmoe-sum": _solve("netmoe", "samples", method="sum"),
    "netmoe-even": _solve("netmoe", "chat", method="even", on="exflow-standard"),
    "netmoe-bottleneck": _solve("netmoe", "small", method="bottleneck", cluster="1x4", links=("intra=50:3",)),
    "netmoe-paper": _solve("netmoe", "small", method="paper", fit_fraction=1.0, samples_per_step=8),
    "luffy-joint": _solve("luffy", "ranked", profile=True),
    "luffy-padded": _solve("luffy", "chat", profile=True, batches="padded", numbers="free", room=2.0),
    "luffy-paper": _solve("luffy", "small", profile=True, method="paper", samples_per_step=8),
    "netmoe-piped": _solve("netmoe", "chat", on="pipemoe-robust", profile=True),
    "flexmoe": _solve("flexmoe", "run", slots=3, purpose="training", profile=True),
    "flexmoe-balance": _solve("flexmoe", "run", slots=3, purpose="training", horizon=30.0, quantile=0.75),
    "eplb-refined": _solve("eplb", "chat", redundant=4),
    "eplb-auto": _solve("eplb", "steps", redundant="auto", quantile=0.9, profile=True),
    "eplb-dead": _solve("eplb", "ranked", dead=(3,), pins=((0, 1), (5, 2)), redundant=2, profile=True),
    "eplb-mixture": _solve("eplb", "steps", mixture={"steps": 3.0, "other-steps": 1.0}, slots=5, method="published"),
    "eplb-whole": _solve("eplb", "grouped", groups="whole", phases=("prefill",)),
    "eplb-decode": _solve("eplb", "chat", redundant=4, phases=("decode",), purpose="serving", profile=True),
    "exflow-prefill": _solve("exflow", "chat", phases=("prefill",), tokens_per_step=60),
    "pipemoe-for-training": _solve("pipemoe", "chat", purpose="training", tokens_per_step=150),
    "auto-decode": _solve("auto", "chat", phases=("decode",), profile=True, concurrency=64),
    "auto-prefill": _solve("auto", "chat", phases=("prefill",), profile=True),
    "contiguous": _solve("contiguous", "ranked", profile=True, dispatch_model="coherent", samples_per_step=12),
}


def _compare(trace: str, *plans: str, **settings: Any) -> dict[str, Any]:
    """Plans, the first of which the others are held against, on a trace, and settings of `compare`."""
    return {"trace": trace, "plans": plans, **settings}


COMPARES: dict[str, dict[str, Any]] = {
    "compare-own": _compare("chat", "exflow-coherent"),
    "compare-drifted": _compare("drifted", "exflow-coherent", "exflow-replan", "exflow-copies"),
    "compare-standard": _compare("ranked", "exflow-standard", "eplb-refined", "contiguous"),
    "compare-timed": _compare("drifted", "eplb-refined", "exflow-coherent", profile=True, phases=("decode",)),
    "compare-static": _compare("ranked", "eplb-refined", "exflow-replicas", replica_rule="static", keep=True),
    "compare-nearest": _compare("chat", "exflow-replicas", replica_rule="nearest", profile=True),
    "compare-dead": _compare("drifted", "eplb-dead", size=StepSize("samples", 10)),
    "compare-pipelines": _compare("drifted", "pipemoe-robust", "pipemoe-paper", profile=True),
    "compare-fp8": _compare("drifted", "pipemoe-fp8", "exflow-standard", profile=True),
    "compare-capacity": _compare("ranked", "pipemoe-capacity", profile=True),
    "compare-policies": _compare("drifted", "netmoe-even", "netmoe-tried", "exflow-coherent", profile=True),
    "compare-samples": _compare("other-samples", "netmoe-sum"),
    "compare-counts": _compare("other-steps", "eplb-auto", "eplb-refined", "exflow-standard"),
    "compare-seen": _compare("small", "netmoe-paper"),
}
