"""Tasks give the same wherever they run: here, in processes, on a real local Ray and on a real local Dask.

And the commands of docs/scale.md run as they stand. One file: its tests run one after another, under one Ray.
"""

import contextlib
import importlib.util
import os
import pickle
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeplan import workers as module
from moeplan.errors import InputError
from moeplan.planner.solve import make
from moeplan.profilers.cluster import Cluster
from moeplan.solvers import eplb
from moeplan.solvers.flexmoe import Policy, follow, initial
from moeplan.solvers.flexmoe.initial import BALANCE_ALONE
from moeplan.traces import dataset
from moeplan.traces.count_form import condense, read_counts, tabulate, write_counts
from moeplan.traces.importers import import_trace, source
from moeplan.traces.reader import Trace
from moeplan.traces.statistics import describe_counts
from moeplan.workers import SERIAL, Workers, opened
from tests.planner.makers import planned
from tests.planner.makers import request as asked
from tests.solvers.flexmoe.layers import COSTS
from tests.traces.builders import COUNTS_META
from tests.traces.importers.recordings import distinct_ids, megatron, write
from tests.workers import cases
from tests.workers.interrupted import gone, started

ROOT = Path(__file__).parents[2]
WAYS = ("2", "ray", "dask", "1", "auto")
#: What starts other processes: "1" is this one, and "auto" is for work of less than a second.
in_other_processes = pytest.mark.parametrize("there", WAYS[:3], indirect=True)


def wanted(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'moeplan[{package.replace('distributed', 'dask')}]'")


@pytest.fixture(scope="module")
def ray() -> Iterator[str]:
    """The address of a Ray that runs on this machine, which `ray` joins."""
    wanted("ray")
    import ray

    paths = {"PYTHONPATH": str(ROOT)}
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": paths})
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture(scope="module")
def dask() -> Iterator[str]:
    """A scheduler of Dask with two workers on this machine."""
    wanted("distributed")
    from distributed import LocalCluster

    sizes = {"n_workers": 2, "threads_per_worker": 1}
    with LocalCluster(**sizes, dashboard_address=":0") as cluster:  # type: ignore[no-untyped-call]
        yield cluster.scheduler_address.replace("tcp://", "dask://")


@pytest.fixture(scope="module", params=WAYS)
def there(request: pytest.FixtureRequest) -> Iterator[Workers]:
    """Workers of every kind."""
    with opened(spec_of(request.param, request)) as workers:
        yield workers


def spec_of(way: str, request: pytest.FixtureRequest) -> str:
    if way == "ray":
        request.getfixturevalue("ray")
    return str(request.getfixturevalue("dask")) if way == "dask" else way


@pytest.fixture
def in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trace:
    """A trace of twelve parts, each a run of its own."""
    monkeypatch.setattr(dataset, "RUN_VALUES", 1)
    return cases.written(tmp_path / "traces")


# The page

PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
PACKAGES = {"Ray, beside vLLM or verl": "ray", "Dask": "distributed"}
PYTHON = shlex.quote(sys.executable)
COMMANDS = {  # scripts of a virtual environment break when it is moved; the example is written once for all sections
    "moeplan": f'[ "$2" = example ] && exec cp -r "$EXAMPLE" "$5"; exec {PYTHON} -I -m moeplan.planner.cli "$@"',
    "dask": f'exec {PYTHON} -m dask "$@"',
    # What srun does, for -n N COMMAND: N processes at once, each told its number.
    "srun": 'shift; N=$1; shift; for i in $(seq 0 $((N - 1))); do SLURM_PROCID=$i SLURM_NTASKS=$N "$@" & done; wait',
}


def sections() -> dict[str, str]:
    """The commands of each section that can be run here, as one script."""
    found = {}
    for title, text in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE):
        blocks = re.findall(r"^```\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        if script := "".join(block for block in blocks if not block.startswith("pip")):
            found[title] = script
    return found


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's example as `traces`, and its `counts`, made by one process."""
    folder = tmp_path_factory.mktemp("alone")
    for words in ("trace example gpt-oss-20b -o traces", "trace count traces -o counts --workers 1"):
        command = [sys.executable, "-I", "-m", "moeplan.planner.cli", *words.split()]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


def contents(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.iterdir())]


@pytest.mark.parametrize("title", sections())
def test_the_commands_of_a_section_give_the_counts_of_one_process(
    title: str, example: Path, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if title in PACKAGES:
        wanted(PACKAGES[title])
    places = tmp_path / "bin"
    joined = {"RAY_ADDRESS": request.getfixturevalue("ray")} if PACKAGES.get(title) == "ray" else {}
    path = f"{places}:{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "EXAMPLE": str(example / "traces")} | joined
    places.mkdir()
    for name, line in COMMANDS.items():
        (places / name).write_text(f"#!/bin/bash\n{line}\n")
        (places / name).chmod(0o755)
    with (tmp_path / "said").open("w+") as said:
        script = ["bash", "-ec", sections()[title]]
        process = subprocess.Popen(script, cwd=tmp_path, env=env, stdout=said, stderr=said, start_new_session=True)
        try:
            code = process.wait(timeout=120)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what stays in the background
        said.seek(0)
        assert code == 0, said.read()
    assert contents(tmp_path / "counts") == contents(example / "counts")


def test_every_scheduler_of_the_page_is_run() -> None:
    assert [*sections()] == ["One machine", "SLURM", *PACKAGES]


def test_a_ray_starts_where_one_was_killed_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    wanted("ray")
    with tempfile.TemporaryDirectory(prefix="m") as short:  # for names of sockets
        Path(short, "ray").mkdir()
        Path(short, "ray", "ray_current_cluster").write_text("127.0.0.1:1")  # which a killed head leaves
        process, worker = started(tmp_path, "ray", {"RAY_TMPDIR": short})
        os.killpg(process.pid, signal.SIGINT)
        out, errors = process.communicate(timeout=40)
    assert (out, process.returncode) == ("closed\n", -signal.SIGINT), errors
    assert errors.count("Traceback") == 1
    assert gone(worker)


# The contract


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_leaving_a_map_ends_its_tasks_on_a_ray_that_goes_on(
    error: type[BaseException] | None, ray: None, tmp_path: Path
) -> None:
    rows, second = [(number, str(tmp_path)) for number in range(5)], tmp_path / "1"
    with contextlib.nullcontext() if error is None else pytest.raises(error), opened("ray") as workers:
        for _ in workers.map(cases.lasting, rows):
            while not second.exists():
                time.sleep(0.01)
            if error is not None:
                raise error
            break
        assert workers.submit(cases.doubled, 4).result() == 8  # both CPUs were taken
    assert gone(int(second.read_text()))
    with opened("ray") as workers:
        assert workers.submit(cases.doubled, 5).result() == 10


def test_results_come_by_their_number_and_in_order_where_asked(there: Workers) -> None:
    rows = [(number,) for number in range(1, 12)]
    assert dict(there.as_completed(cases.doubled, rows)) == {number: 2 * number + 2 for number in range(11)}
    assert list(there.map(cases.doubled, rows)) == [2 * number for (number,) in rows]
    assert there.submit(cases.doubled, 4).result() == 8


def test_what_a_task_raises_is_raised_where_its_result_is_asked_for(there: Workers) -> None:
    with pytest.raises(InputError, match=r"^part 3: damaged$"):
        there.submit(cases.refusing, 3).result()
    with pytest.raises(ZeroDivisionError, match="bug 1"):
        list(there.map(cases.broken, [(1,), (2,)]))


def test_a_value_that_was_sent_to_all_is_itself_among_the_arguments(there: Workers) -> None:
    value = there.broadcast(b"x" * 1_000_000)
    assert list(there.map(cases.length, [(value, number) for number in range(5)])) == [1_000_000 + n for n in range(5)]


@pytest.mark.parametrize("way", WAYS[:3])
def test_inside_a_worker_auto_is_serial_and_there_is_one_thread(way: str, request: pytest.FixtureRequest) -> None:
    with opened(spec_of(way, request)) as workers:
        assert workers.submit(cases.place).result() == ("Serial", 1, "1")
    assert module.num_threads() == len(os.sched_getaffinity(0))


def test_auto_does_little_work_here_and_more_in_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "num_threads", lambda: 2)
    monkeypatch.setattr(module, "HERE_S", 0.05)
    with opened("auto") as workers:
        pids = list(workers.map(os.getpid, [()] * 3))
        workers.submit(time.sleep, 0.06).result()
        pids += workers.map(os.getpid, [()] * 3)
    assert pids[:3] == [os.getpid()] * 3
    assert os.getpid() not in pids[3:]


# The same bytes


def counted(trace: Trace, workers: Workers, folder: Path) -> list[bytes]:
    """The files of a trace's counts, those of the phase that is in some of them alone, and of the counts' counts."""
    tables = (tabulate(trace, workers=workers), tabulate(trace, phases=["train"], workers=workers))
    parts = [write_counts(folder / str(number), COUNTS_META, table) for number, table in enumerate(tables)]
    again = condense(*[read_counts(folder / "0")] * 2, workers=workers)
    parts.append(write_counts(folder / "again", COUNTS_META, again))
    return [path.read_bytes() for names in parts for path in names]


@in_other_processes
def test_counts_are_the_same_bytes_wherever_parts_are_counted(in_parts: Trace, there: Workers, tmp_path: Path) -> None:
    assert len([*in_parts.runs()]) == 12
    here = counted(in_parts, SERIAL, tmp_path / "here")
    assert counted(in_parts, there, tmp_path / "there") == here
    assert len(here) == 3


@in_other_processes
def test_statistics_are_the_same_wherever_parts_are_read(in_parts: Trace, there: Workers, tmp_path: Path) -> None:
    here, elsewhere = (pickle.dumps(cases.described(in_parts, one)) for one in (SERIAL, there))
    assert elsewhere == here
    write_counts(tmp_path / "counts", COUNTS_META, tabulate(in_parts))
    counts = read_counts(tmp_path / "counts")
    assert pickle.dumps(describe_counts(counts, workers=there)) == pickle.dumps(describe_counts(counts))


def test_a_run_of_parts_is_counted_as_one_trace_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = cases.written(tmp_path / "traces")
    assert len([*trace.runs()]) == 1
    whole = pickle.dumps(cases.described(trace, SERIAL)), counted(trace, SERIAL, tmp_path / "whole")
    monkeypatch.setattr(dataset, "RUN_VALUES", 5000)
    assert 1 < len([*trace.runs()]) < 12
    assert (pickle.dumps(cases.described(trace, SERIAL)), counted(trace, SERIAL, tmp_path / "runs")) == whole


@in_other_processes
def test_an_import_is_the_same_wherever_lines_are_parsed(
    there: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids_RBLTK = distinct_ids(np.random.default_rng(0), (3, 2, 3, 50), 16, 2)
    files, blocks = write(tmp_path / "files", megatron(ids_RBLTK, [1, 2, 3])), list[Any]()
    import_trace(files, tmp_path / "here")
    monkeypatch.setattr(source, "LINES_BYTES", 1000)
    monkeypatch.setattr(Workers, "submit", noting(Workers.submit, blocks))
    import_trace(files, tmp_path / "there", workers=there)
    here, elsewhere = ([path.read_bytes() for path in (tmp_path / name).iterdir()] for name in ("here", "there"))
    assert elsewhere == here
    assert sum(workers is there for workers in blocks) > 12

    lines = (files / "router_trace_rank1.jsonl").read_text().splitlines()
    for change in ('{"step": 0}', lines[0]):  # no choices; a step that was over
        (files / "router_trace_rank1.jsonl").write_text("\n".join([*lines[:4], change, *lines[4:], "[]"]))
        with pytest.raises(InputError, match=r"router_trace_rank1.jsonl: line 5: "):
            import_trace(files, tmp_path / "refused", workers=there)


def test_a_line_that_is_too_long_is_named_after_what_workers_made_of_those_before(
    there: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "LINES_BYTES", 20)
    (tmp_path / "lines").write_text("".join(f"{number}\n\n" for number in range(10, 60)) + "9" * 50 + "\n1\n")
    parsed = source.parsed_lines(cases.number_in, tmp_path / "lines", 40, there)
    assert [next(parsed) for _ in range(50)] == [*range(10, 60)]
    with pytest.raises(InputError, match=r"^line 101: over 40 bytes"):
        next(parsed)


@pytest.fixture(scope="module")
def few_tokens(make_trace: Any) -> Trace:
    trace: Trace = make_trace(samples=24)
    return trace


@pytest.fixture(scope="module")
def auto_here(few_tokens: Trace) -> Any:
    """A plan of `auto`, its candidates tried one after another."""
    return planned(few_tokens, "auto")


@pytest.mark.parametrize("way", ["ray", "dask"])
def test_a_plan_is_the_same_wherever_candidates_are_tried(
    way: str, request: pytest.FixtureRequest, few_tokens: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted, spec = list[Any](), spec_of(way, request)
    auto_here = request.getfixturevalue("auto_here")
    monkeypatch.setattr(Workers, "submit", noting(Workers.submit, submitted))
    with opened(spec) as workers:
        plan: Any = make(asked(few_tokens, "auto"), workers=workers).plan
    assert len(submitted) > 2
    assert (plan.decisions, plan.evaluation, plan.verdict) == (
        auto_here.decisions,
        auto_here.evaluation,
        auto_here.verdict,
    )


def noting(submit: Any, by: list[Any]) -> Any:
    """`Workers.submit`, which notes whose it was."""

    def noted(workers: Workers, *args: Any) -> Any:
        by.append(workers)
        return submit(workers, *args)

    return noted


@in_other_processes
@pytest.mark.parametrize("rule", ["even", "lp"])
def test_placements_are_the_same_wherever_layers_are_refined(there: Workers, rule: Any) -> None:
    loads_BLE = np.random.default_rng(0).gamma(0.5, 100, (40, 4, 16)).astype(np.int64)
    tables = [
        eplb.solve(loads_BLE, Cluster(1, 4), slots=5, replica_rule=rule, workers=one).placement.physical_to_logical
        for one in (SERIAL, there)
    ]
    assert tables[0].tobytes() == tables[1].tobytes()


@in_other_processes
def test_runs_are_the_same_wherever_layers_are_placed_and_replayed(there: Workers) -> None:
    records = np.random.default_rng(1).poisson(20, (12, 3, 1, 8, 4)).astype(np.int64)
    start = np.tile(np.arange(8).reshape(4, 2), (3, 1, 1))
    runs = [follow(records, start, Policy(), COSTS, group=2, workers=one) for one in (SERIAL, there)]
    tables = [initial(records[:4], 3, COSTS, group=2, policy=BALANCE_ALONE, workers=one) for one in (SERIAL, there)]
    assert tables[0].tobytes() == tables[1].tobytes()
    for name in ("tables", "period", "sent", "balance", "seconds"):
        assert getattr(runs[0], name).tobytes() == getattr(runs[1], name).tobytes()
    assert (runs[0].operations, runs[0].changes) == (runs[1].operations, runs[1].changes)


@pytest.mark.parametrize("way", WAYS[:3])
def test_the_task_of_a_lost_worker_runs_again(way: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    with opened(spec_of(way, request)) as workers:
        rows = [(number, str(tmp_path)) for number in range(3)]
        assert list(workers.map(cases.dying_once, rows)) == [0, 1, 2]


def test_neither_ray_nor_dask_is_imported_unless_asked_for() -> None:
    code = "import sys; from moeplan.workers import opened\nwith opened('1'): pass\nprint(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"ray", "distributed", "dask", "numpy", "multiprocessing"} & {*loaded.split()}
