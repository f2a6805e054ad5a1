"""Measuring: from a request to the Profile, on local ranks or in a launched world."""

import dataclasses
from collections.abc import Callable, Sequence
from itertools import groupby

from ..errors import UsageError
from .cases import CASES
from .cluster import Cluster, Link
from .fits.fit import MIN_SLOPE, Fit, fit
from .harness import Case, Request, Start, Step, measure_cases
from .launch import found_launch
from .origin import Origin, now
from .profile import Profile
from .series import Series
from .world import run_world

__all__ = ["DEFAULT_CPU_RANKS", "measure"]

DEFAULT_CPU_RANKS = 4


def measure(
    *,
    num_ranks: int | None = None,
    device: str = "auto",
    quick: bool = False,
    timeout_s: float = 120.0,
    on_progress: Callable[[Step], None] | None = None,
    cases: Sequence[Case] = tuple(CASES.values()),
) -> Profile | None:
    """The profile of this machine, or of the world that torchrun or srun launched (then None on ranks other than 0).

    Parameters
    ----------
    num_ranks
        Local processes; by default 4 on CPU and one a GPU on CUDA. In a launched world, None or its size.
    device
        "cpu", "cuda", or "auto": cuda where there is a GPU.
    timeout_s
        The longest silence before a rank counts as hung.
    on_progress
        Receives each size as it is measured.

    Returns
    -------
    Profile
        After Ctrl-C what was measured until then, with `complete` false.

    Raises
    ------
    KeyboardInterrupt
        Ctrl-C before anything was measured.
    RankError
        A rank died, hung or got a wrong answer; it is named.
    UsageError
        The ranks cannot be started, or are spread unevenly over hosts.
    """
    place = _device(device)
    log = _Log(on_progress)
    complete = True
    try:
        run_world(
            _ranks(num_ranks, place),
            measure_cases,
            Request(tuple(cases), quick),
            device=place,
            timeout_s=timeout_s,
            on_progress=log.receive,
        )
    except KeyboardInterrupt:
        if not log.steps:
            raise
        complete = False
    return None if log.start is None else _profile(log.start, log.steps, complete=complete, cases=cases)


class _Log:
    """What the ranks have reported so far."""

    def __init__(self, on_progress: Callable[[Step], None] | None) -> None:
        self.start: Start | None = None
        self.steps: list[Step] = []
        self._on_progress = on_progress

    def receive(self, report: Start | Step) -> None:
        """Keep a report and hand steps on."""
        if isinstance(report, Start):
            self.start = report
            _cluster(report.hosts)  # refuses an uneven world before time is spent on it
            return
        self.steps.append(report)
        if self._on_progress is not None:
            self._on_progress(report)


def _device(device: str) -> str:
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"device {device!r}; expected auto, cpu or cuda")
    if device == "cpu":
        return device
    import torch

    found = torch.cuda.is_available()
    if device == "cuda" and not found:
        raise UsageError(
            "device cuda, but PyTorch finds no GPU here; use --device cpu, or install a CUDA build of torch"
        )
    return "cuda" if found else "cpu"


def _ranks(num_ranks: int | None, device: str) -> int | None:
    if num_ranks is not None or found_launch() is not None:
        return num_ranks
    if device == "cpu":
        return DEFAULT_CPU_RANKS
    import torch

    return torch.cuda.device_count()


def _cluster(hosts: Sequence[str]) -> Cluster:
    """The cluster the ranks form, without links: consecutive ranks share a host."""
    runs = [len(list(run)) for _, run in groupby(hosts)]
    if len(runs) != len(set(hosts)) or len(set(runs)) != 1:
        raise UsageError(
            f"{len(hosts)} ranks lie on {len(set(hosts))} hosts in runs of {runs}; expected consecutive ranks, the same"
            " number on each host"
        )
    return Cluster(len(runs), runs[0])


def _profile(start: Start, steps: Sequence[Step], *, complete: bool, cases: Sequence[Case]) -> Profile:
    cluster = _cluster(start.hosts)
    found = [one for case in cases for dtype in _dtypes(case, steps) if (one := _series(case, dtype, steps, cluster))]
    series = {one.key: one for one in found}
    all_to_all = next((one.fit for one in found if one.case == "all_to_all"), None)
    links = _links(cluster, all_to_all)
    return Profile.make(
        complete=complete,
        origins=(Origin(kind="measured", created_at=now(), environment=start.environment),),
        cluster=dataclasses.replace(cluster, links=links),
        link_origins=dict.fromkeys(links, 0),
        series=series,
    )


def _dtypes(case: Case, steps: Sequence[Step]) -> list[str]:
    return list(dict.fromkeys(step.dtype for step in steps if step.case == case.name))


def _series(case: Case, dtype: str, steps: Sequence[Step], cluster: Cluster) -> Series:
    measurements = tuple(step.measurement for step in steps if (step.case, step.dtype) == (case.name, dtype))
    together = case.min_ranks > 1
    return Series(
        case=case.name,
        dtype=dtype,
        ranks=cluster.num_devices if together else 1,
        link=("intra" if cluster.num_nodes == 1 else "inter") if together else None,
        unit=case.unit,
        measurements=measurements,
        fit=fit([one.work for one in measurements], [one.median_s for one in measurements]),
    )


def _links(cluster: Cluster, all_to_all: Fit | None) -> dict[str, Link]:
    """The link class that the all-to-all was bound by; none where its time did not grow with size.

    Notes
    -----
    The fit counts all bytes that leave a rank. On one host they all cross its own links. On several, the (P-G) of
    (P-1) blocks between hosts (P ranks, G a host) are taken to decide the time, so that a byte between hosts costs

        b_inter = b (P-1) / (P-G)
    """
    if all_to_all is None or all_to_all.model.b_s == MIN_SLOPE:
        return {}
    latency_s, s_per_byte = all_to_all.model.a_s, all_to_all.model.b_s
    if cluster.num_nodes == 1:
        return {"intra": Link(latency_s, s_per_byte)}
    between = cluster.num_devices - cluster.devices_per_node
    return {"inter": Link(latency_s, s_per_byte * (cluster.num_devices - 1) / between)}
