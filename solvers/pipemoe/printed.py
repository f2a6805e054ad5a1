"""Algorithm 1 of PipeMoE as it is printed, kept as a baseline and so that its faults can be shown.

Legend: r pipeline degree; d = b_a n_d and e = b_e n_e seconds of a layer's bytes and multiply-adds without start-up.
"""

import math
from collections.abc import Callable

__all__ = ["printed_degree"]

Function = Callable[[float], float]
STRICT = 1e-10  # what a constraint must exceed, and SLSQP's tolerance, as the authors' solver sets them
TOLERANCE = 1e-11


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
    """Where SLSQP stops, rounded, on its way to the least objective over r >= 2 and constraints > 0."""
    from scipy.optimize import minimize

    strict = [{"type": "ineq", "fun": lambda x, f=f: f(x[0]) - STRICT} for f in constraints]
    at_least_2 = {"type": "ineq", "fun": lambda x: x[0] - 2}
    found = minimize(lambda x: objective(x[0]), [2.0], method="SLSQP", tol=TOLERANCE, constraints=[*strict, at_least_2])
    return max(1, math.floor(float(found.x[0]) + 0.5))
