"""`moeplan apply` to engines and to checkpoints, `--undo` and `validate`, as a user calls them."""

import json
import shlex
import stat
from pathlib import Path
from typing import Any

import pytest

from moeplan.planner.cli.apply import _written, apply
from moeplan.planner.cli.commands import group
from moeplan.runtime.exports import ENGINES, prepared
from moeplan.runtime.plan import Metric, Verdict, load, save
from tests.planner.makers import edited, planned
from tests.runtime.checkpoints.made_checkpoints import (
    assert_same,
    expert_tensors,
    files_of,
    permuted_by_hand,
    plan_of,
    read_tensors,
    spec,
    write_checkpoint,
)
from tests.traces.importers.recordings import config

ROWS = [[2, 0, 3, 1], [3, 1, 0, 2]]
DOCS = Path(__file__).parents[3] / "docs" / "engines"
CONFIG = config(4, 1, 8, 2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with a plan and a checkpoint."""
    write_checkpoint(tmp_path / "model", expert_tensors((0, 1), 4), shards=2)
    save(plan_of(spec(), ROWS), tmp_path / "plan.json")
    return tmp_path


def test_a_checkpoint_is_permuted_told_and_undone(moeplan: Any, folder: Path) -> None:
    (folder / "model" / "config.json").chmod(0o400)
    screen = moeplan("apply", "--checkpoint", "model", "-o", "planned", cwd=folder).stdout
    assert "wrote     planned    5 files" in screen
    assert "4 experts of 2 layers in the plan's order" in screen
    assert "expert parallelism over 2 ranks, 2 experts each" in screen
    assert "moeplan apply --undo planned -o DIR" in screen
    expected = permuted_by_hand(read_tensors(folder / "model"), plan_of(spec(), ROWS))
    assert_same(read_tensors(folder / "planned"), expected)
    assert not (folder / ".moeplan").exists()
    (folder / "fresh").mkdir()  # whose rights are those of new files
    assert stat.S_IMODE((folder / "planned").stat().st_mode) == stat.S_IMODE((folder / "fresh").stat().st_mode)
    assert (folder / "planned" / "config.json").stat().st_mode & stat.S_IWUSR
    (folder / "plan.json").unlink()
    screen = moeplan("apply", "--undo", "planned", "-o", "back", cwd=folder).stdout
    assert "byte for byte what was permuted" in screen
    assert files_of(folder / "back") == files_of(folder / "model")


def test_json_holds_what_was_done(moeplan: Any, folder: Path) -> None:
    done = moeplan("apply", "plan.json", "--checkpoint", "model", "-o", "planned", "--json", cwd=folder)
    document = json.loads(done.stdout)
    assert (document["plan"], document["directory"]) == ("plan.json", "planned")
    assert (document["layers"], document["num_experts"]) == ([0, 1], 4)
    done = moeplan("apply", "--undo", "planned", "-o", "back", "--json", cwd=folder)
    assert json.loads(done.stdout)["changed"] == []


def test_what_an_engine_makes_of_a_coherent_plan_without_benefit_is_said(moeplan: Any, folder: Path) -> None:
    verdict = Verdict(value="none", metric="device_copies", against="contiguous", gain=Metric(value=0), at_least=0)
    options = {"placement": {"dispatch_model": "coherent"}}
    save(plan_of(spec(), ROWS, options=options, verdict=verdict), folder / "coherent.json")
    screen = moeplan("apply", "coherent.json", "--checkpoint", "model", "-o", "planned", cwd=folder).stdout
    assert "the plan is for coherent dispatch; an engine's standard dispatch returns tokens home" in screen
    assert "no benefit shown: the plan holds no figures" in screen


@pytest.mark.parametrize("way", ["checkpoint", "undo"])
def test_ctrl_c_says_what_is_kept_of_a_checkpoint(
    folder: Path, way: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        error = KeyboardInterrupt()
        error.add_note("half is kept")
        raise error

    monkeypatch.chdir(folder)
    monkeypatch.setattr(f"moeplan.runtime.checkpoints.{'permute' if way == 'checkpoint' else way}", interrupted)
    asked: Any = {way: Path("model"), "output": Path("new")}
    with pytest.raises(SystemExit, match="130"):
        apply(**asked)
    assert capsys.readouterr().err == "moeplan: interrupted; half is kept\n"


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("--checkpoint", "model"), 2, ": --checkpoint writes a new directory; name it with -o DIRECTORY"),
        (("--engine", "sglang"), 2, ": --engine writes a new directory; name it with -o DIRECTORY"),
        (("--undo", "model"), 2, ": --undo writes a new directory; name it with -o DIRECTORY"),
        (("-o", "out"), 2, "-o DIRECTORY goes with --engine NAME, --checkpoint DIRECTORY or --undo DIRECTORY"),
        (("--hf-config", "config.json"), 2, ": --hf-config goes with --engine NAME; give that"),
        (("--checkpoint", "model", "--engine", "sglang", "-o", "out"), 2, ": --engine and --checkpoint do different"),
        (("--checkpoint", "model", "--undo", "model", "-o", "out"), 2, ": --checkpoint and --undo do different things"),
        (("--checkpoint", "model", "--trace", "traces", "-o", "out"), 2, "--checkpoint does not go with --trace;"),
        (("--undo", "model", "--hf-config", "x.json", "-o", "out"), 2, "--undo does not go with --hf-config;"),
        (("plan.json", "--engine", "sglang", "-o", "out", "--", "true"), 2, "--engine does not go with a command"),
        (("--", "./train.sh", "-c"), 2, "named before --; expected moeplan apply plan.json -- ./train.sh -c"),
        (("--engine", "vllm", "-o", "out", "--", "true"), 2, "before --; expected moeplan apply plan.json -- true"),
        (("plan.json", "--", "gone", "--", "x"), 2, ": gone: no such command; nothing was applied"),
        (("--checkpoint", "model", "-o", "model"), 2, "already there and not empty"),
        (("--checkpoint", "model", "-o", "model/planned"), 2, "inside model, which is read"),
        (("--checkpoint", "gone", "-o", "out"), 3, "gone: no directory"),
        (("--undo", "model", "-o", "out", "--", "true"), 2, "--undo needs no plan; leave true out"),
        (("--undo", "model", "-o", "out"), 3, "no moeplan-permutation.json"),
        (("gone.json", "--checkpoint", "model", "-o", "out"), 3, "gone.json: cannot be read"),
        (("--checkpoint", "model", "-o", "plan.json/out"), 7, "cannot be written"),
    ],
)
def test_a_checkpoint_that_cannot_be_permuted_is_refused_in_one_line(
    refuse: Any, folder: Path, args: tuple[str, ...], code: int, words: str
) -> None:
    refuse("apply", *args, cwd=folder, code=code, words=words)


@pytest.fixture(scope="module")
def plan(make_trace: Any) -> Any:
    """Three layers of eight experts in twelve slots on four devices, in the order of the checkpoint: no benefit."""
    return planned(make_trace(layers=3, experts=8), "contiguous", "1x4", slots=3)


@pytest.fixture
def home(plan: Any, tmp_path: Path) -> Path:
    """A directory with the plan and the config.json of its model."""
    save(plan, tmp_path / "plan.json")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "mixtral.json").write_text(json.dumps(CONFIG | {"model_type": "mixtral"}))
    return tmp_path


def test_a_plan_becomes_an_engine_s_files_and_they_are_sound(moeplan: Any, home: Path) -> None:
    args = ("apply", "plan.json", "--engine", "tensorrt-llm", "-o", "out", "--hf-config", "config.json", "--force")
    lines = moeplan(*args, cwd=home).stdout.splitlines()
    assert lines[-2] == "start"
    assert lines[-1].startswith("trtllm-serve ")
    assert str(home / "out" / "extra_config.yaml") in lines[-1]
    assert any("verdict   gain not certain" in line or "no benefit" in line for line in lines)
    assert any("round_robin" in line for line in lines)
    assert not (home / ".moeplan").exists()
    asked = ("--hf-config", "config.json", "--ep-size", 4, "--redundant", 4)
    said = moeplan("validate", "out", "--engine", "tensorrt-llm", *asked, cwd=home).stdout
    assert said == "out is sound for tensorrt-llm: 3 MoE layers\n"
    wrong = moeplan("validate", "out", "--engine", "tensorrt-llm", *asked[:2], "--ep-size", 5, cwd=home, code=3)
    assert wrong.stdout.splitlines()[0] == "is --ep-size 5 meant? without it the file is sound"
    assert len(wrong.stdout.splitlines()) == 2
    wrong = moeplan("validate", "out", "--engine", "tensorrt-llm", *asked[:2], "--redundant", 3, cwd=home, code=3)
    assert wrong.stdout.startswith("is --redundant 3 meant? without it the file is sound\n")
    (home / "other.json").write_text(json.dumps(CONFIG | {"n_routed_experts": 16}))
    again = ("validate", "out", "--engine", "tensorrt-llm", "--hf-config", "other.json")
    wrong = moeplan(*again, cwd=home, code=3).stdout.splitlines()
    assert wrong[0] == "is other.json the config.json of this file's model? it has 3 MoE layers of 16 experts"
    assert wrong[1:] == [
        "12 slots per layer for 16 experts; every expert needs one",
        "hidden layer 1, 2, 3, 4: leaves out expert 8, 9, 10, 11 and 4 more (8 of 16 are nowhere)",
    ]
    assert len(json.loads(moeplan(*again, "--json", cwd=home, code=3).stdout)["findings"]) == 5
    bad = moeplan("validate", "config.json", "--engine", "sglang", *asked, "--json", cwd=home, code=3)
    assert len(json.loads(bad.stdout)["findings"]) == 1
    assert bad.stderr.count("\n") == 1


def test_of_a_plan_that_an_engine_carries_out_in_part_the_row_of_compare_is_named(
    make_trace: Any, make_profile: Any, tmp_path: Path
) -> None:
    trace, placed, profile = make_trace(layers=3, experts=8), tmp_path / "placed.json", make_profile("1x4")
    plans = [planned(trace, "eplb", "1x4", redundant=4, profile=profile, to=placed)]
    plans.append(planned(trace, "pipemoe", "1x4", on=placed, profile=profile))
    for row, plan in zip(("", " (the row at degree 1)"), plans, strict=True):
        output = tmp_path / plan.strategies[-1]
        _, lines = _written(plan, prepared(plan, "vllm-ascend", output), "vllm-ascend", output)
        (said,) = (line for line in lines if line.startswith("replicas"))
        assert said.endswith(f"the plan was judged by even: moeplan compare PLAN --replica-rule static replays it{row}")


def test_a_plan_for_an_engine_as_json(moeplan: Any, home: Path) -> None:
    said = json.loads(moeplan("apply", "--engine", "vllm", "-o", "new/out", "--json", "--force", cwd=home).stdout)
    assert (said["engine"], said["directory"], said["replica_rule"]) == ("vllm", "new/out", "even")
    assert all((home / "new" / "out" / file).is_file() for file in said["files"])
    assert said["command"].startswith(f"PYTHONPATH={home}/new/out")
    assert said["conditions"]


def test_an_engine_s_files_that_cannot_be_made_leave_nothing(refuse: Any, home: Path) -> None:
    apply = ("apply", "plan.json", "--force", "--engine", "sglang", "-o", "out")
    refuse(*apply[:-2], cwd=home, code=2, words="name it with -o DIRECTORY")
    refuse(*apply, cwd=home, code=2, words="--hf-config")
    refuse(*apply, "--hf-config", "mixtral.json", cwd=home, code=2, words="Mixtral has no expert-location hook")
    (home / "gpt_oss.json").write_text(json.dumps(CONFIG | {"model_type": "gpt_oss"}))
    vllm = ("apply", "plan.json", "--engine", "vllm", "-o", "out", "--force", "--hf-config", "gpt_oss.json")
    refuse(*vllm, cwd=home, code=2, words="gpt-oss has no EPLB in vllm")


@pytest.mark.parametrize(
    ("change", "args", "words"),
    [
        ({"decisions.dispatch": "coherent"}, ("--engine", "vllm"), "made for coherent dispatch"),
        ({}, ("--engine", "sglang"), "give the model's --hf-config config.json"),
        ({}, ("--engine", "sglang", "--hf-config", "mixtral.json"), "expert-location hook"),
        ({}, ("--engine", "tutel"), "pipeline degrees, and the plan decides placement"),
    ],
    ids=["dispatch", "missing flag", "model type", "decision"],
)
def test_a_mismatch_with_the_engine_is_named_before_a_figure_is_recomputed(
    refuse: Any, plan: Any, home: Path, change: dict[str, Any], args: tuple[str, ...], words: str
) -> None:
    forged = edited(plan, "evaluation.held_out.contenders.0.metrics.balance.value", 99.0)
    save(forged, home / "forged.json")
    refuse("apply", "forged.json", "--force", cwd=home, code=5, words="balance")  # which certifying finds
    for path, value in change.items():
        forged = edited(forged, path, value)
    save(forged, home / "forged.json")
    refuse("apply", "forged.json", "--force", *args, "-o", "out", cwd=home, code=2, words=words)


def test_a_plan_without_benefit_is_refused_in_one_line_until_it_is_forced(
    moeplan: Any, refuse: Any, home: Path
) -> None:
    write_checkpoint(home / "model", expert_tensors((0, 1), 4), shards=2)
    for verb, *way in (
        ("activate",),
        ("write", "--engine", "vllm", "-o", "out"),
        ("write", "--engine", "sglang", "-o", "out"),
        ("write", "--checkpoint", "model", "-o", "out"),
    ):
        words = f"to {verb} it anyway, give --force"
        said = refuse("apply", "plan.json", *way, cwd=home, code=8, words=words).stderr
        assert any(f"plan.json: {word}" in said for word in ("the plan is what runs today", "no benefit", "gain not"))
    said = moeplan("apply", "plan.json", "--force", cwd=home).stdout
    assert "\ncertified plan.json" in said  # below the answer
    following = "next: moeplan.runtime.load_plan() in your loop, or moeplan apply plan.json --engine "
    assert following in " ".join(said.split())
    assert (home / ".moeplan" / "active.json").read_bytes() == (home / "plan.json").read_bytes()


def test_a_plan_without_verdict_or_interval_is_applied_with_a_warning(
    moeplan: Any, make_trace: Any, plan: Any, home: Path
) -> None:
    single = planned(make_trace(samples=8), "eplb", "1x4", to=home / "single.json")
    assert (single.verdict.value, single.verdict.gain.low) == ("none", None)
    said = " ".join(moeplan("apply", "single.json", cwd=home).stdout.split())
    assert "no benefit shown: " in said
    assert "one step shows nothing" in said
    save(plan.model_copy(update={"evaluation": None, "verdict": None, "outcome": {}}), home / "bare.json")
    assert "not judged: the plan holds no figures" in moeplan("apply", "bare.json", cwd=home).stdout
    written = moeplan("apply", "bare.json", "--engine", "vllm", "-o", "bare", cwd=home).stdout
    assert "verdict   not judged" in written
    trained = edited(load(home / "bare.json"), "options.evaluation.use", "training")
    save(trained, home / "trained.json")
    written = moeplan("apply", "trained.json", "--engine", "vllm", "-o", "trained", cwd=home).stdout
    assert "judged for training; vllm serves: moeplan solve --for serving --engine vllm" in " ".join(written.split())


@pytest.mark.parametrize("command", ["apply", "validate"])
def test_the_help_names_every_engine(command: str) -> None:
    (option,) = [option for option in group.load(command).params if option.name == "engine"]
    assert all(name in option.help for name in ENGINES)


def test_the_commands_of_the_engine_pages_are_real() -> None:
    pages = sorted(DOCS.glob("*.md"))
    blocks = [block for page in pages for block in page.read_text().split("```")[1::2]]
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("moeplan ")]
    assert len(pages) > len(ENGINES)
    assert len(lines) > 2 * len(ENGINES)
    for line in lines:
        words = shlex.split(line)[1:]
        command = group.load(words[0])
        command = command.load(words[1]) if words[0] == "trace" else command
        known = {flag for option in command.params for flag in option.opts}
        assert {word for word in words if word.startswith("-")} <= known, line
