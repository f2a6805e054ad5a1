"""The commit that figures are of."""

import subprocess
from pathlib import Path

from moeplan.errors import UsageError

ROOT = Path(__file__).parents[1]
SAVED = "docs/benchmarks"  # where results go: changes there are no others' figures
TOLD = 3


def commit(root: Path = ROOT) -> str:
    """The commit's name, "+" after it where other files than saved results are changed or new; or "unknown"."""
    name = _git(root, "rev-parse", "--short=12", "HEAD")
    return "unknown" if name is None else name.strip() + ("+" if _changes(root) else "")


def refuse_changes(root: Path = ROOT) -> None:
    """Raise a UsageError unless all files but saved results are those of a commit."""
    if commit(root) == "unknown":
        raise UsageError(f"--save in {root}, which has no git commit; expected a checkout, run it there")
    if changes := _changes(root):
        more = f" and {len(changes) - TOLD} more" if len(changes) > TOLD else ""
        raise UsageError(
            f"--save with uncommitted changes ({', '.join(changes[:TOLD])}{more}); figures name their commit: expected"
            f" none outside {SAVED}; commit them first"
        )


def _changes(root: Path) -> list[str]:
    found = _git(root, "status", "--porcelain", "--no-renames", "--", ".", f":(exclude){SAVED}") or ""
    return [line[3:] for line in found.splitlines()]


def _git(root: Path, *args: str) -> str | None:
    done = subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=False)
    return None if done.returncode else done.stdout
