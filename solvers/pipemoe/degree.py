"""The pipeline degree of one layer that takes the fewest seconds, in closed form, and as the paper prints it.

t(r) is the greater of two convex arms (`seconds.pass_arms`), so over the reals it is least at r = 1, at the minimum of
an arm, sqrt(s / q), or where the arms cross; over the integers at the floor or ceiling of one of these. The sum of the
passes is convex too, and least between the degrees of the two.

Each pass is taken alone, as in the paper. Where the runtime computes both from the same calls of the experts, degrees
that differ cost more than is said here (`layers.py`). Algorithm 1 of PipeMoE as it is printed is kept as a baseline,
and so that its faults can be shown.

Legend: L MoE layers; r pipeline degree; p, q, s coefficients of an arm p + q r + s / r; d = b_a n_d and e = b_e n_e
seconds of a layer's bytes and multiply-adds without start-up.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..arrays import Floats, Ints
from ..outcome import Objective, Outcome
from .seconds import Arms, pass_arms, turning_points

HIGHEST = 2**31  # what "no limit" means
TUTEL_MAX_DEGREE = 32  # AllToAllStatus.max_num_split in Tutel
IDLE = Arms(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
Function = Callable[[float], float]
STRICT = 1e-10  # what a constraint must exceed, and SLSQP's tolerance, as the authors' solver sets them
TOLERANCE = 1e-11


@dataclass(frozen=True, slots=True)
class Degrees:
    """Pipeline degrees of one layer, with the seconds they take, and how they came about."""

    #: forward, backward: a degree for each pass; `backward` is 1 where there is no backward pass
    forward: int
    backward: int
    joint: int  #: The one degree for both passes (Tutel has one)
    #: forward_s, backward_s: seconds of the passes at their own degrees
    forward_s: float
    backward_s: float
    joint_s: float  #: Seconds of both passes at `joint`
    outcome: Outcome  #: Of `forward` and `backward`: its objective is forward_s + backward_s


@dataclass(frozen=True, slots=True)
class LayerDegrees:
    """`Degrees` of many layers, `[L]` each; the objective is the sum over them."""

    forward: Ints
    backward: Ints
    joint: Ints
    forward_s: Floats
    backward_s: Floats
    joint_s: Floats
    outcome: Outcome


def optimal_degree(
    *,
    a_a: float,
    b_a: float,
    a_e: float,
    b_e: float,
    n_d: float,
    n_e: float,
    backward: float = 2.0,
    max_degree: int | None = None,
    full_duplex: bool = False,
    method: Literal["exact", "paper"] = "exact",
) -> Degrees:
    """The best pipeline degrees of a layer: forward, backward, and one for both; the smallest among equals.

    Parameters
    ----------
    a_a, b_a, a_e, b_e
        Seconds to start an all-to-all and seconds a byte; to start the experts and a multiply-add.
    n_d, n_e
        Bytes that a rank dispatches, and multiply-adds of its experts.
    backward
        How many times as long as forward the experts compute backward, start-up included (gradients of inputs and of
        weights: 2); 0 where there is no backward pass.
    max_degree
        The largest degree allowed, e.g. `TUTEL_MAX_DEGREE`; None for no limit.
    full_duplex
        Dispatch and combine do not share a channel (`seconds.layer_seconds`).
    method
        "exact", or "paper": Algorithm 1 as printed (`printed_degree`), its one degree for both passes.

    Raises
    ------
    ValueError
        A negative or infinite number, a limit below 1, an unknown method; no limit where nothing takes time to start.
    """
    started = time.perf_counter()
    constants = _checked(a_a, b_a, a_e, b_e, n_d, n_e, backward=backward, max_degree=max_degree)
    there, back = _passes(*constants, backward=backward, full_duplex=full_duplex)
    highest = max_degree or HIGHEST
    forward, backward_r = _lowest(there, highest), _lowest(back, highest)
    bound = _seconds(there, forward) + _seconds(back, backward_r)
    if method == "exact":
        joint = _lowest_of_both(there, back, min(forward, backward_r), max(forward, backward_r))
        return _degrees(there, back, (forward, backward_r, joint), bound, started)
    if method != "paper":
        raise ValueError(f"method {method!r}; expected exact or paper")
    printed = min(printed_degree(*constants), highest)
    return _degrees(there, back, (printed, printed if backward else 1, printed), bound, started)


def _passes(
    a_a: float, b_a: float, a_e: float, b_e: float, n_d: float, n_e: float, *, backward: float, full_duplex: bool
) -> tuple[Arms[float], Arms[float]]:
    there = pass_arms(a_a, b_a, a_e, b_e, n_d, n_e, full_duplex=full_duplex)
    if not backward:
        return there, IDLE
    return there, pass_arms(a_a, b_a, backward * a_e, backward * b_e, n_d, n_e, full_duplex=full_duplex)


def _degrees(
    there: Arms[float], back: Arms[float], degrees: tuple[int, int, int], bound: float, started: float
) -> Degrees:
    """The result of these degrees, forward, backward and joint."""
    forward, backward, joint = degrees
    forward_s, backward_s = _seconds(there, forward), _seconds(back, backward)
    outcome = Outcome.of(
        objective=Objective("layer_s", forward_s + backward_s, "min"),
        bound=bound,
        bound_kind="exact",
        proven=forward_s + backward_s <= bound,
        started=started,
    )
    return Degrees(
        forward, backward, joint, forward_s, backward_s, _seconds(there, joint) + _seconds(back, joint), outcome
    )


def _checked(
    *numbers: float, backward: float, max_degree: int | None
) -> tuple[float, float, float, float, float, float]:
    """The constants as plain floats, which are several times as fast as NumPy's."""
    a_a, b_a, a_e, b_e, n_d, n_e = floats = tuple(map(float, numbers))
    finite = math.isfinite(a_a + b_a + b_e + n_d + n_e + b_a * n_d + (a_e + b_e * n_e) * (1 + backward))
    if not (finite and min(floats) >= 0 and backward >= 0) or (max_degree is not None and max_degree < 1):
        raise ValueError(
            f"constants {floats}, backward {backward}, limit {max_degree}; expected finite numbers >= 0, a limit >= 1"
        )
    if max_degree is None and a_a == a_e == 0:
        raise ValueError("nothing takes time to start, so that more chunks are never worse; give max_degree")
    return a_a, b_a, a_e, b_e, n_d, n_e


def _seconds(arms: Arms[float], r: float) -> float:
    p1, q1, s1, p2, q2, s2 = arms
    return max(p1 + q1 * r + s1 / r, p2 + q2 * r + s2 / r)


def _lowest(arms: Arms[float], highest: int) -> int:
    """The degree of the fewest seconds up to `highest`."""
    best_s, best = _seconds(arms, 1), 1
    for point in turning_points(arms):
        below = math.floor(min(point, highest)) if point > 1 else 1
        for r in (below, min(below + 1, highest)):
            best_s, best = min((best_s, best), (_seconds(arms, r), r))
    return best


def _lowest_of_both(one: Arms[float], other: Arms[float], low: int, high: int) -> int:
    """The degree of the fewest seconds of two passes, their own degrees being `low` and `high`."""
    while low < high:
        middle = (low + high) // 2
        if _seconds(one, middle + 1) + _seconds(other, middle + 1) < _seconds(one, middle) + _seconds(other, middle):
            low = middle + 1
        else:
            high = middle
    return low


def printed_degree(a_a: float, b_a: float, a_e: float, b_e: float, n_d: float, n_e: float) -> int:
    """The degree that Algorithm 1 chooses for the forward pass; not always the best one, nor near it.

    Notes
    -----
    Two slips of type are mended, since nothing would be left to run: line 5 is Eq. 19, t1 = 2 (a_a + d) + (a_e + e),
    and line 6 divides by a_a - a_e, not by 0 (where these are equal, r2 = 2). The rest is kept, faults and all:

        (1) r2 = max(2, ceil((e - d) / (a_a - a_e))), t2 = 2 r2 a_a + 2 d       Eq. 28: where a_a < a_e the quotient
                bounds r from above, and t2 is promised at a degree that does not attain it
        (2) r3, t3 = solve(f3), f3(r) = 2 a_a + e + a_e r + 2 d / r             Eq. 34-37
        (3) r4, t4 = solve(f4), f4(r) = 2 a_a r + 2 d                           Eq. 41-44
        (4) 1 where t1 <= min(t2, t3, t4), else the one that promises least; none is evaluated with t(r)

    `solve` is SLSQP from r = 2, rounded, its failures not asked for (it often cannot meet the constraints), as in the
    authors' own solver.

    References
    ----------
    PipeMoE, Algorithm 1; solver.py of github.com/Fragile-azalea/PipeMoE.
    """
    d, e = b_a * n_d, b_e * n_e

    def f3(r: float) -> float:
        return 2 * a_a + e + a_e * r + 2 * d / r

    def f4(r: float) -> float:
        return 2 * a_a * r + 2 * d

    def experts_longer(r: float) -> float:
        return a_e + e / r - a_a - d / r

    def experts_bind(r: float) -> float:
        return r * a_e + e - 2 * (r - 1) * (a_a + d / r)

    r2 = max(2, math.ceil((e - d) / (a_a - a_e))) if a_a != a_e else 2
    r3 = _solve(f3, experts_longer, experts_bind)
    r4 = _solve(f4, experts_longer, lambda r: -experts_bind(r))
    promised_s, degree = min([(f4(r2), r2), (f3(r3), r3), (f4(r4), r4)], key=lambda promise: promise[0])  # (1) (2) (3)
    return 1 if 2 * (a_a + d) + a_e + e <= promised_s else degree  # (4)


def _solve(objective: Function, *constraints: Function) -> int:
    """Degree at which SLSQP stops, rounded, on its way to the least objective over r >= 2 and constraints > 0."""
    from scipy.optimize import minimize

    strict = [{"type": "ineq", "fun": lambda x, f=f: f(x[0]) - STRICT} for f in constraints]
    at_least_2 = {"type": "ineq", "fun": lambda x: x[0] - 2}
    found = minimize(lambda x: objective(x[0]), [2.0], method="SLSQP", tol=TOLERANCE, constraints=[*strict, at_least_2])
    return max(1, math.floor(float(found.x[0]) + 0.5))
