"""Clusters that others run: Ray and Dask, extras that are imported where they are asked for."""

import contextlib
import os
import pickle
import socket
import warnings
from collections.abc import Callable
from concurrent.futures import Future, wait
from importlib import import_module
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from .tasks import TRIES, Answer, Held, message, reply

ANSWER_S = 15  # that a cluster has to answer
RAY_TRY_S = "RAY_CLIENT_MAX_CONNECTION_TIMEOUT_S"  # of three
QUIET_RAY = {"log_to_driver": False, "logging_level": "ERROR"}


class Ray:
    """A cluster of Ray: the one at an address, else the one that runs here, else a new one on this machine."""

    def __init__(self, address: str) -> None:
        os.environ.setdefault(RAY_TRY_S, str(ANSWER_S // 3))
        self._ray = ray = import_module("ray")
        self._joined_before = ray.is_initialized()
        if address:
            _connected(address).close()
            with warnings.catch_warnings(action="ignore"):
                ray.init(f"ray://{address}", logging_level="ERROR")
        elif not self._joined_before:
            self._start_or_join()
        self._reply = ray.remote(reply).options(num_cpus=1, max_retries=TRIES - 1)
        self._answers = dict[Future[Answer], Future[Answer]]()  # Ray's, which nobody cancels, to those handed out
        self.size = max(1, int(ray.cluster_resources().get("CPU", 1)))

    def submit(self, task: Callable[..., Any], *args: Any) -> "Future[Answer]":
        """Begin a task."""
        reference, future = self._reply.remote(*message(task, args)), Future[Answer]()
        answer: Future[Answer] = reference.future()
        self._answers[answer] = future
        future.add_done_callback(lambda _: future.cancelled() and self._ray.cancel(reference, force=True))
        answer.add_done_callback(self._hand_out)
        return future

    def broadcast(self, value: Any) -> Any:
        """Put a value into the object store."""
        return Held(self._ray.put(pickle.dumps(value)))

    def close(self) -> None:
        """Cancel what is left, and leave the cluster unless it was joined before."""
        left = dict(self._answers)
        for future in left.values():
            future.cancel()
        wait(left, ANSWER_S)  # Ray crashes where it shuts down with answers under way
        if not self._joined_before:
            self._ray.shutdown()

    def _hand_out(self, answer: "Future[Answer]") -> None:
        """Give an answer of Ray to who waits for it; nobody does once that was cancelled."""
        future = self._answers.pop(answer)
        if not future.set_running_or_notify_cancel():
            return
        if (error := answer.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(answer.result())

    def _start_or_join(self) -> None:
        head = Path(os.environ.get("RAY_TMPDIR", gettempdir()), "ray", "ray_current_cluster")
        try:
            if "RAY_ADDRESS" not in os.environ and head.exists():  # also of one that was killed: Ray would wait for it
                with contextlib.suppress(ValueError):  # of a damaged file
                    _connected(head.read_text().strip()).close()
            self._ray.init("auto", **QUIET_RAY)
        except OSError:  # none runs
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would report to the network
            self._ray.init("local", include_dashboard=False, **QUIET_RAY)


class Dask:
    """The scheduler of Dask at an address."""

    def __init__(self, address: str) -> None:
        distributed = import_module("distributed")
        with contextlib.suppress(ConnectionRefusedError), _connected(address) as speaks_first:  # or starts only now
            speaks_first.recv(1)  # without which the client would wait for ever
        self._client = distributed.Client(f"tcp://{address}", timeout=ANSWER_S, set_as_default=False)
        self._executor = self._client.get_executor(pure=False)
        self.size = max(1, sum(self._client.nthreads().values()))

    def submit(self, task: Callable[..., Any], *args: Any) -> "Future[Answer]":
        """Begin a task."""
        future: Future[Answer] = self._executor.submit(reply, *message(task, args))
        return future

    def broadcast(self, value: Any) -> Any:
        """Send a value to all workers."""
        return Held(self._client.scatter(pickle.dumps(value), broadcast=True))

    def close(self) -> None:
        """Cancel what is left, and leave the scheduler."""
        self._executor.shutdown(wait=False)
        self._client.close()


CLUSTERS: dict[str, Callable[[str], Ray | Dask]] = {"ray": Ray, "dask": Dask}


def _connected(address: str) -> socket.socket:
    """A connection; OSError where the host is unknown, or takes none at the port."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), ANSWER_S)
