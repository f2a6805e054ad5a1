"""CBC, the integer solver that comes with PuLP, called so that it ends in time and leaves nothing behind."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pulp import LpProblem

SEARCH_SHARE = 0.9  # of the time; in the rest it writes what it has found


def solve_by_cbc(model: "LpProblem", *, time_limit_s: float | None = None, options: Sequence[str] = ()) -> None:
    """Minimize a model from its variables' initial values, silently; what is found is in the model as PuLP leaves it.

    Parameters
    ----------
    time_limit_s
        CBC looks at its own limit between the steps of a search alone, and minutes may pass before the first: when
        these seconds are over it is killed, and nothing is found.
    options
        As CBC's command line takes them, without the dash.
    """
    import pulp

    class Cbc(pulp.COIN_CMD):  # type: ignore[misc]
        def actualSolve(self, lp: "LpProblem", **_: object) -> int:  # noqa: N802
            """Run CBC on a file of the problem, and kill it at the limit; pulp's status."""
            with TemporaryDirectory() as folder:
                problem, start, solution = (str(Path(folder, name)) for name in ("model.mps", "start", "solution"))
                variables, *names = lp.writeMPS(problem, rename=1)
                given = any(variable.value() is not None for variable in variables)
                if given:
                    self.writesol(start, lp, variables, *names[:2])
                flags = ["-mips", start] if given else []
                if time_limit_s is not None:
                    flags += ["-timeMode", "elapsed", "-sec", f"{time_limit_s * SEARCH_SHARE:g}"]
                flags += [word for option in options for word in f"-{option}".split()]
                command = [self.path, problem, *flags, "-solve", "-printingOptions", "all"]
                try:
                    subprocess.run(
                        [*command, "-solution", solution],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        timeout=time_limit_s,
                        check=True,
                    )
                except subprocess.TimeoutExpired:
                    lp.assignStatus(pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound)
                    return int(pulp.LpStatusNotSolved)
                status, values, *_, found = self.readsol_MPS(solution, lp, variables, *names)
            lp.assignVarsVals(values)
            lp.assignStatus(status, found)
            return int(status)

    model.solve(Cbc(path=pulp.PULP_CBC_CMD.pulp_cbc_path, msg=False))
