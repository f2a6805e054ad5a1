"""Candidates that workers decide ahead of auto's search: those that stand on what is known already."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ....workers import Pending
from .candidate import Candidate, Component, Components

if TYPE_CHECKING:
    from .search import Search

_of_thread = threading.local()  # `own`: the last search of a thread, with all that it has read


def submit(search: "Search", several: Sequence[Components]) -> dict[Components, Pending[Candidate]]:
    """Let workers decide those candidates of several whose base is known.

    None before the first candidate is known, because it says which others are left out. None under a time limit,
    because the time left says which are tried.
    """
    workers = search.task.workers
    ready = [*dict.fromkeys(components for components in several if _is_ready(search, components))]
    limited = search.params.time_limit_s is not None
    if workers is None or workers.size == 1 or limited or not search.tried or not ready:
        return {}
    _of_thread.own, task = search, search.task.portable()  # its own for tasks that run in this process
    sent, pending = workers.broadcast(search.unread(task)), dict[Components, Pending[Candidate]]()
    for *before, component in ready:
        base = search.tried.get(tuple(before))
        light = base and replace(base, solved=replace(base.solved, task=task))
        pending[(*before, component)] = workers.submit(solved_ahead, sent, component, light)
    return pending


def cancel(pending: Mapping[Components, Pending[Candidate]]) -> None:
    """Forget what this thread has read, and cancel the rest; on Ray what runs ends, too."""
    _of_thread.own = None
    for candidate in pending.values():
        candidate.future.cancel()


def result_of(search: "Search", pending: Pending[Candidate], component: Component, base: Candidate | None) -> Candidate:
    """A candidate as workers decided it, as if it had been here; errors as in `Search.solve_component`."""
    candidate = pending.result()
    task = search.task_of(component, base.solved if base else None, inner=True, search_s=search.search_s)
    components = (*(base.components if base else ()), component)
    return replace(candidate, components=components, solved=replace(candidate.solved, task=task))


def solved_ahead(search: "Search", component: Component, base: Candidate | None) -> Candidate:
    """A candidate as a worker decides it, without what its task has read."""
    own: Search = getattr(_of_thread, "own", None) or search
    _of_thread.own = own = own if own.key == search.key else search
    candidate: Candidate = own.solve_component(component, base, is_first=False)
    return replace(candidate, solved=replace(candidate.solved, task=own.task.portable()))


def _is_ready(search: "Search", components: Components) -> bool:
    """Check whether components are not known, and what the last stands on is."""
    *before, component = components
    if components in search.tried or components in search.refused:
        return False
    base = search.tried.get(tuple(before))
    return not before or (base is not None and component.strategy.stands_on(base.solved.plan))
