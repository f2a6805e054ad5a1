"""The outcome of a certification."""

from dataclasses import dataclass, field

from ...errors import CertificationError

TOLERANCE = 1e-9  # relative


@dataclass(slots=True)
class Certificate:
    """Certificate of a plan: checks made, checks left out, figures recomputed, and the largest relative difference."""

    checks: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    figures: int = 0
    largest_difference: float = 0.0

    def summary(self, plan: object, trace: object) -> str:
        """List the checks made and those left out, a line each."""
        if trace is None:
            checks = ", ".join(self.checks)
            return f"NOT certified {plan}: structure only ({checks}); no trace to hold its figures against"
        lines = [
            f"certified {plan} against {trace}: {self.figures} figures recomputed, largest relative difference"
            f" {self.largest_difference:.1g}",
            f"checked   {', '.join(self.checks)}",
        ]
        if self.unchecked:
            lines.append(f"unchecked {', '.join(self.unchecked)}")
        return "\n".join(lines)

    def agree(self, what: str, claimed: float | None, found: float | None, *, tolerance: float = TOLERANCE) -> None:
        """Record a figure, refusing one that differs."""
        if (claimed is None) != (found is None):
            raise CertificationError(f"{what}: the plan says {claimed}, the recount {found}")
        if claimed is None or found is None:
            return
        difference = abs(claimed - found) / max(abs(claimed), abs(found), 1e-300)
        if not difference <= tolerance:  # NaN agrees with nothing
            raise CertificationError(
                f"{what}: the plan says {claimed:.12g}, the recount {found:.12g}; the plan was not made from this"
                " trace by this version, or was edited. Re-run moeplan solve"
            )
        self.figures += 1
        self.largest_difference = max(self.largest_difference, difference)
