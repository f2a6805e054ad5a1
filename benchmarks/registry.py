"""The subjects of benchmarks by name; a subject's module is imported only when it runs."""

import importlib
from typing import Any

from .study import Study

SUBJECTS = {
    "exflow": "ExFlow placements: hops kept on unseen tokens, shares of the best known, growth with L, E and D",
    "pipemoe": "PipeMoE degrees: the closed form, brute force and the paper's Algorithm 1",
    "netmoe": "NetMoE homes of samples: Tables 4 and 5, ablation of the prediction, busiest ports, real counts",
    "netmoe_joint": "NetMoE homes and ExFlow placement together, beside either alone",
    "assignment": "Balanced assignment: transportation, min-cost flow, Kuhn-Munkres and CBC",
    "eplb": "EPLB placements: excess over the bound, raw, repaired and refined; groups on nodes; steps not seen",
    "traces": "Importing and counting a trace, beside plain NumPy",
    "fits": "Fits of published GPU tables: errors on sizes held out",
    "large_trace": "Commands on large traces: linear in tokens, bounded memory",
    "exflow_paper": "ExFlow's Figures 7, 8 and 13 and Table III: what the paper states beside what comes out here",
    "bounds": "Bounds on the hops that any placement keeps: gap to one that was found, by kind, and seconds",
    "recording": "What recording adds to a model's passes",
    "emulated_cluster": "Plans carried out on an emulated cluster: seconds measured beside seconds predicted",
}
DEFAULT = tuple(SUBJECTS)[:6]  # the strategies and what they solve with


def studies(name: str) -> tuple[Study[Any], ...]:
    """The studies of a subject."""
    found: tuple[Study[Any], ...] = importlib.import_module(f".cases.{name}", __package__).STUDIES
    return found
