"""Screens of commands as text, at several widths; seconds of solvers, dates and hashes are told apart from the rest."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from moeplan.planner.cli.screen import HangingConsole
from moeplan.planner.learning_curve import curve_report, learning_curve
from moeplan.planner.report.compare import compare_report
from moeplan.planner.report.plan import show_report, solve_report
from moeplan.planner.report.profile import profile_report
from moeplan.planner.report.trace import trace_report
from moeplan.planner.strategies.exflow import ExflowParams
from moeplan.profilers.profile import load as load_profile
from moeplan.traces.reader import open_trace
from moeplan.traces.statistics import describe
from tests.golden.cases import COMPARES, SOLVES
from tests.golden.workshop import Workshop, shared_profile, trace_of

FOLDER = Path(__file__).parent / "screens"
WIDTHS = (80, 120)
CHANGING = (  # from run to run
    (r"\d+\.\d s, (?=feasible|optimal)", "# s, "),
    (r"compiled for .*\n", ""),
    (r"solves in \d+ s", "solves in # s"),
    (r"(?m)^((?:plan|static|eplb every|paper).*\S) +[\d.,]+ [mu]?s$", r"\1 # s"),
    (r"[0-9a-f]{12}  \d{4}-\d\d-\d\d", "(hash)  (date)"),
)

Shown = Callable[[Workshop, HangingConsole], None]


def _solved(case: str, *, verbose: bool = False) -> Shown:
    return lambda shop, console: solve_report(shop.plan(case), Path(f"{case}.json"), console, verbose=verbose)


def _compared(case: str, *, verbose: bool = False) -> Shown:
    return lambda shop, console: compare_report(shop.comparison(case), console, verbose=verbose)


def _shown(shop: Workshop, console: HangingConsole) -> None:
    show_report(shop.plan("pipemoe-paper"), Path("pipemoe-paper.json"), console)


def _curve(shop: Workshop, console: HangingConsole) -> None:
    request = shop.request("exflow-coherent")
    assert isinstance(request.params, ExflowParams)
    params = replace(request.params, time_limit_s=1e5)  # so that work ends every solve
    curve_report(learning_curve(replace(request, params=params)), console)


def _profile(shop: Workshop, console: HangingConsole) -> None:
    profile_report(load_profile(shared_profile()), Path("profile.json"), console)


def _trace(shop: Workshop, console: HangingConsole) -> None:
    trace = open_trace(trace_of("ranked"))
    trace_report(trace, describe(trace), console)


SCREENS: dict[str, Shown] = {
    **{case: _solved(case) for case in SOLVES},
    **{case: _compared(case) for case in COMPARES},
    **{f"{case}-verbose": _solved(case, verbose=True) for case in ("exflow-copies", "pipemoe-unequal", "eplb-auto")},
    "netmoe-tried-verbose": _solved("netmoe-tried", verbose=True),
    "compare-policies-verbose": _compared("compare-policies", verbose=True),
    "show": _shown,
    "learning-curve": _curve,
    "profile": _profile,
    "trace-info": _trace,
}


def screen(shop: Workshop, name: str) -> str:
    """A screen at every width, one after another."""
    texts = []
    for width in WIDTHS:
        console = HangingConsole(width)
        with console.capture() as captured:
            SCREENS[name](shop, console)
        text = "\n".join(line.rstrip() for line in captured.get().split("\n"))
        for pattern, instead in CHANGING:
            text = re.sub(pattern, instead, text)
        texts.append(f"[{width} columns]\n{text}")
    return "".join(texts)
