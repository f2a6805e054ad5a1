"""`validate` is stricter than the engines: each fault is a finding or a refusal of one line, and nothing else is."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from moeplan.errors import InputError, UsageError
from moeplan.planner.cli import flags
from moeplan.runtime.exports import ENGINES, Expected, export, validate
from tests.runtime.exports.engine_plans import ENGINES_OF_PLACEMENTS, degrees_plan, expected_of, model_of, plan_of
from tests.runtime.exports.faults import FAULTS, Change
from tests.traces.importers.mutations import mutants

PLAN = plan_of(slots=3, model=model_of(layers=3, dense=1, mtp=1))  # 8 experts in 12 slots on 4 devices
DEGREES = degrees_plan()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The value in each engine's file of a sound plan."""
    values = {}
    for name, engine in ENGINES.items():
        folder = tmp_path_factory.mktemp(name) / "out"
        export(DEGREES if name == "tutel" else PLAN, name, folder)
        values[name] = yaml.safe_load((folder / engine.file).read_text())  # JSON is YAML
    return values


def test_help_names_every_engine() -> None:
    assert flags.ENGINES.split(", ") == [*ENGINES]


def expected(engine: str, **changed: Any) -> Expected:
    return expected_of(DEGREES if engine == "tutel" else PLAN, **changed)


def written(engine: str, value: Any, folder: Path) -> Path:
    """The value in a file of the engine's kind."""
    path = folder / ENGINES[engine].file
    text = yaml.safe_dump(value) if path.suffix == ".yaml" else json.dumps(value)
    path.write_text(text)
    return path


def changed(value: Any, change: Change) -> Any:
    """A copy of a value after a change in place, or what the change returns."""
    copy = yaml.safe_load(yaml.safe_dump(value))
    returned = change(copy)
    return copy if returned is None else returned


@pytest.mark.parametrize(("engine", "fault"), [(engine, fault) for engine in FAULTS for fault in FAULTS[engine]])
def test_a_fault_is_found_and_named(engine: str, fault: str, sound: dict[str, Any], tmp_path: Path) -> None:
    assert validate(written(engine, sound[engine], tmp_path), engine, expected(engine)) == []
    change, said = FAULTS[engine][fault]
    findings = validate(written(engine, changed(sound[engine], change), tmp_path), engine, expected(engine))
    assert findings
    assert all(line.isprintable() and len(line) < 300 for line in findings)
    assert any(re.search(said, line) for line in findings), findings


@pytest.mark.parametrize("engine", ENGINES_OF_PLACEMENTS)
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"num_devices": 5}, "divide by 5 devices|5 devices|expected 5"),
        ({"redundant": 5}, "13: 8 experts and 5 redundant|expected 13"),
        ({"num_devices": 1}, "hold an expert twice|expected 1"),
        ({"model": model_of(layers=4, dense=1, mtp=1)}, "expected|without"),
        ({"model": model_of(layers=3, dense=1, mtp=1, experts=9)}, "expected 13|leaves out expert 8"),
    ],
)
def test_a_sound_file_for_another_engine_size_or_model_is_not_sound(
    engine: str, asked: dict[str, Any], said: str, sound: dict[str, Any], tmp_path: Path
) -> None:
    findings = validate(written(engine, sound[engine], tmp_path), engine, expected(engine, **asked))
    assert any(re.search(said, line) for line in findings), findings


def test_more_than_a_hundred_findings_are_cut(tmp_path: Path) -> None:
    row = [*range(256), *range(31), -1]
    model = model_of(layers=58, dense=3, experts=256, mtp=1)
    table = {"physical_to_logical_map": [[1, *row[1:]]] * 61}
    asked = Expected(model=model, num_devices=32, redundant=32)
    findings = validate(written("sglang", table, tmp_path), "sglang", asked)
    assert "hidden layer 0: names expert -1; expected 0 to 255" in findings
    assert "hidden layer 0: device 0 holds expert 1 twice; the second is never served, or wrong" in findings
    assert (len(findings), findings[-1]) == (101, "and more")


BROKEN = {
    "empty": b"",
    "binary": bytes(range(256)) * 8,
    "deep": b"[" * 200_000,
    "deep dashes": b"- " * 200_000,
    "not a number": b'{"physical_to_logical_map": [[NaN]]}',
    "many digits": b"[[" + b"1" * 10_000 + b"]]",
    "twice a key": b'{"num_slots": 1, "num_slots": 1}',
    "aliases": b"num_slots: 8\ninitial_global_assignments: {0: &a [0, 1], 1: *a}\nlayer_updates_per_iter: 0\n",
    "laughs": b"a: &a [1]\nb: &b [*a, *a]\nc: &c [*b, *b]\n",
    "a tag": b"!!python/object/apply:os.system ['touch hacked']\n",
    "a hexadecimal": b"num_slots: 0x%b\ninitial_global_assignments: {0x%b: []}\n" % (b"f" * 20_000, b"f" * 20_000),
    "a date": b"num_slots: 2020-01-01\ninitial_global_assignments: {}\nlayer_updates_per_iter: 0\n",
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_refused_or_found_out(engine: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / ENGINES[engine].file
    path.write_bytes(BROKEN[kind])
    assert _outcome(path, engine) == "refused"
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_no_file_or_too_large_is_refused_unread(engine: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as stream:
        stream.truncate(2**40)
    for name in ("pipe", "large", "missing", ".", "a\0b"):
        with pytest.raises(InputError):
            validate(tmp_path / name, engine, expected(engine))
    with pytest.raises(UsageError, match="expected one of"):
        validate(tmp_path / "large", "sgl", expected(engine))


@pytest.mark.parametrize("engine", ENGINES)
def test_mutated_files_end_in_a_line_each(engine: str, tmp_path: Path) -> None:
    export(DEGREES if engine == "tutel" else PLAN, engine, tmp_path / "out")
    sound_files = {
        str(file.relative_to(tmp_path / "out")): file.read_bytes()
        for file in (tmp_path / "out").rglob("*")
        if file.is_file()
    }
    for number, files in enumerate(mutants(sound_files, seed=0, count=60)):
        for name, content in files.items():
            path = tmp_path / str(number) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        _outcome(tmp_path / str(number), engine)


def _outcome(path: Path, engine: str) -> str:
    """What `validate` says of a file: sound or refused, by findings or by an error of one line."""
    try:
        lines = validate(path, engine, expected(engine))
    except InputError as error:
        lines = [str(error)]
    assert len(lines) <= 101
    assert all(line.isprintable() and len(line) < 400 for line in lines)
    return "refused" if lines else "sound"


@pytest.mark.parametrize(
    "text",
    [
        "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 12)),
        "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10 if i else '1')}]\n" for i in range(12)) + "? *a11\n: 1\n",
        "num_slots: 1" + ":1" * 400_000,
        "num_slots: 1" + ":1" * 400_000 + ".5",
    ],
    ids=["merges", "keys", "base 60", "floats of base 60"],
)
def test_yaml_that_would_take_for_ever_is_refused_at_once(text: str, tmp_path: Path) -> None:
    (tmp_path / "load.yaml").write_text(text)
    with pytest.raises(InputError, match=r"not YAML: a (key that is no name|number of too many digits)"):
        validate(tmp_path / "load.yaml", "tensorrt-llm", expected_of(plan_of()))


@pytest.mark.parametrize("lost", ["*.dist-info/entry_points.txt", "moeplan.json", "moeplan_vllm_plan.py"])
def test_a_plugin_that_vllm_would_not_find_or_with_one_row_for_all_is_a_finding(lost: str, tmp_path: Path) -> None:
    export(PLAN, "vllm", tmp_path / "out")
    (file,) = (tmp_path / "out").glob(lost)
    content = file.read_bytes()
    file.unlink()
    assert validate(tmp_path / "out", "vllm", expected("vllm")) != []
    file.write_bytes(content)
    row = json.dumps([*range(8), 0, 1, 2, 3])
    for path in (tmp_path / "out" / "expert_map.json", tmp_path / "map.json"):
        path.write_text(row)
    (finding,) = validate(tmp_path / "out", "vllm", expected("vllm"))
    assert "one row for all layers, which vllm#49572 takes and moeplan_vllm_plan.py does not" in finding
    assert validate(tmp_path / "map.json", "vllm", expected("vllm")) == []


def test_devices_may_be_unknown_and_a_model_not_placed_is_a_finding(sound: dict[str, Any], tmp_path: Path) -> None:
    path, asked = written("vllm", sound["vllm"], tmp_path), expected("vllm", num_devices=None, redundant=None)
    assert validate(path, "vllm", asked) == []
    for engine, kind in (("sglang", "mixtral"), ("sglang", "llama4_text"), ("vllm", "gpt_oss")):
        path = written(engine, sound[engine], tmp_path)
        (finding,) = validate(path, engine, expected(engine, model_type=kind))
        assert "--checkpoint" in finding
        assert validate(path, engine, expected(engine, model_type="deepseek_v3")) == []
    short = written("vllm", changed(sound["vllm"], lambda value: value[2].pop() and None), tmp_path)
    assert validate(short, "vllm", asked) == ["layer 2: 11 slots; expected 12"]
