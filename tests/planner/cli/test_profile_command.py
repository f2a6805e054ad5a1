"""`moeplan profile` beside measuring: merging, resuming, refusals, and what it prints."""

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from moeplan.planner.cli import profile as profile_command
from moeplan.planner.cli import screen
from moeplan.planner.figures import percent
from moeplan.planner.report.profile import profile_report, remarks
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.description import describe
from moeplan.profilers.fits.piecewise import Piecewise
from moeplan.profilers.harness import Place, Step
from moeplan.profilers.measurement import Measurement
from moeplan.profilers.origin import Noise
from moeplan.profilers.profile import Profile, load, save
from moeplan.profilers.series import Series
from moeplan.profilers.topology import Topology, measured_links
from tests.builders import known, measured_profile, series
from tests.planner import makers
from tests.profilers.tables.test_read_tables import NCCL, nccl, write

COLLECTIVES = ("all_to_all", "all_gather", "all_reduce", "reduce_scatter")
DTYPES = ("uint8", "fp32", "bf16")


def measured(complete: bool = True) -> Profile:
    """A profile of many series on two nodes whose times tell other islands."""
    sizes = [{"bytes": 16 * 10**power} for power in range(5)]
    return measured_profile(
        Cluster(2, 8),
        *(series(case, 16, "inter", dtype=dtype, sizes=sizes) for case in COLLECTIVES for dtype in DTYPES),
        complete=complete,
        topology=Topology(node_of_rank=(0,) * 8 + (1,) * 8, island_of_rank=(0, 1) * 8, ratio=3.0),
        noise=Noise(sizes=60, wide=30),
        full=True,
    )


def printed(profile: Profile, width: int) -> str:
    return makers.screen(profile_report, profile, Path("profile.json"), width=width)


def of_series(*measured: Series) -> Profile:
    return describe("1x4").model_copy(update={"series": {one.key: one for one in measured}})


def test_the_screen_says_of_a_link_how_many_devices_share_it() -> None:
    lines = printed(describe("2x8", ["intra=400:2", "inter=6.25:5:8"]), 100).splitlines()
    assert [line for line in lines if line.startswith("link")] == [
        "link      intra: 400 GB/s, 2.00 us",
        "link      inter: 6.25 GB/s, 5.00 us, shared by 8 devices",
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_the_screen_has_a_line_a_series_and_says_what_was_noticed(width: int) -> None:
    profile = measured()
    text = printed(profile, width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    for key in profile.series:
        (line,) = [line for line in lines if line.startswith(key + " ")]
        assert re.search(r"GB/s.*%", line)
    words = " ".join(text.split())
    assert "3.0 times apart: 2 islands" in words
    assert "measured topology contradicts the hosts" in words
    assert "NOISY: 30 of 60 medians (50 %)" in words
    assert len(remarks(profile)) == 3


def test_a_merged_profile_says_which_part_came_from_where(moeplan: Any, refuse: Any, tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    save(measured(), tmp_path / "node.json")
    save(describe("2x8", ["intra=400:2"]), tmp_path / "net.json")
    done = moeplan("profile", "--merge", "node.json", "net.json", "-o", "all.json", cwd=tmp_path)
    words = " ".join(done.stdout.split())
    assert "link intra: taken from net.json" in words
    assert "measured [1] node.json: 16 ranks" in words
    assert "described [2] 2x8 (net.json)" in words
    assert "intra: 400 GB/s, 2.00 us, from [2]" in words
    assert load(tmp_path / "all.json").link_origins == {"intra": 1}
    done = moeplan("profile", "--merge", "net.json", "node.json", "-o", "all.json", "--json", cwd=tmp_path)
    document = json.loads(done.stdout)
    assert "cluster 2x8: net.json and node.json agree" in document["notes"]
    assert any("NOISY" in note for note in document["notes"])
    merge = ("profile", "--merge", "net.json", "node.json", "-o", "new.json", "--plot")
    refuse(*merge, "/proc/x.html", cwd=tmp_path, code=7, words="/proc/x.html: cannot be written")
    long = "x" * 245 + ".html"  # but the name of what becomes it is too long
    assert "new.json is written," in moeplan(*merge, long, cwd=tmp_path, code=7).stderr
    assert (tmp_path / "new.json").is_file()


def test_only_where_this_machine_was_measured_the_toy_is_recorded(moeplan: Any, tmp_path: Path) -> None:
    save(measured(), tmp_path / "node.json")
    for words in (("--cluster", "2x8", "-o", "net.json"), ("--merge", "node.json", "net.json", "-o", "all.json")):
        done = moeplan("profile", *words, cwd=tmp_path)
        assert not (tmp_path / "traces").exists()
        without, following = done.stdout.splitlines()[-2:]
        assert without.startswith("without a trace: moeplan trace import FILES (counts), or moeplan trace record MODEL")
        assert following == f"next: moeplan solve --trace DIR --profile {words[-1]}"
    before = json.dumps(measured().model_dump(mode="json"), sort_keys=True)  # a plan would name this file by its hash
    (tmp_path / "profile.json").write_text(before)
    said = moeplan("profile", "--resume", "--full", "--plot", "fits.html", cwd=tmp_path).stdout
    assert "profile.json is complete: nothing to do" in said
    assert said.splitlines()[-1].startswith("next: moeplan solve")
    assert (tmp_path / "traces").exists()
    assert (tmp_path / "fits.html").stat().st_size > 1000
    assert (tmp_path / "profile.json").read_text() == before


def test_a_series_without_enough_sizes_says_what_is_missing_and_prints_no_rate() -> None:
    lone = series("point_to_point", 2, "intra", sizes=[{"bytes": 64}], a_s=4e-4)
    profile = measured_profile(
        Cluster(1, 4), lone, quick=True, left_out=9, missing={lone.key: 5, "all_gather/uint8@4/intra": 4}
    )
    lines = {line.split(" ")[0]: line for line in printed(profile, 100).splitlines() if line}
    assert "1 of 6 sizes" in lines[lone.key]
    assert "0 of 4 sizes" in lines["all_gather/uint8@4/intra"]
    assert "GB/s" not in "".join(lines.values())
    assert "left out" in printed(profile, 100)


def test_sizes_that_lie_close_together_tell_no_link() -> None:
    near, far = (series("all_to_all", 4, "intra", sizes=[{"bytes": 4096}, {"bytes": top}]) for top in (8192, 2**20))
    assert measured_links(Cluster(1, 4), {near.key: near}) == {}
    assert set(measured_links(Cluster(1, 4), {far.key: far})) == {"intra"}


@pytest.mark.parametrize(
    ("link", "words"),
    [
        ("400:2.5", "400 GB/s, 2.50 us"),
        ("1:1333", "1 GB/s, 1,333 us"),
        ("999.8:999.7", "1000 GB/s, 1,000 us"),
        ("99.97:1999800", "100 GB/s, 2,000 ms"),
        ("1:999800000", "1 GB/s, 1,000 s"),
    ],
)
def test_a_link_is_told_in_three_digits_and_the_unit_that_fits(link: str, words: str) -> None:
    assert f"intra: {words}" in printed(describe("1x2", [f"intra={link}"]), 80)


@pytest.mark.parametrize(("shared_by", "words"), [("", ""), (":1.58", ", shared by 1.58 devices")])
def test_a_link_says_how_many_devices_share_it(shared_by: str, words: str) -> None:
    lines = printed(describe("2x4", [f"inter=50:5{shared_by}"]), 80).splitlines()
    assert [line for line in lines if "inter:" in line] == [f"link      inter: 50 GB/s, 5.00 us{words}"]


def test_figures_just_below_a_power_of_ten_are_rounded_to_it_in_digits() -> None:
    for gbps, shown in ((99.7, "100 GB/s"), (9.97, "10 GB/s"), (0.997, "1 GB/s")):
        one = series("all_to_all", 4, "intra", a_s=0, b_s=1e-9 / gbps)
        assert f" {shown} " in printed(of_series(one), 120)
    one = series("all_to_all", 4, "intra", sizes=[{"bytes": 4 * 10**power} for power in (4, 5)], a_s=0, b_s=3.322e-10)
    assert " 10us-100us " in printed(of_series(one), 120)


class Killed(BaseException):
    """What no process hears of."""


@pytest.fixture
def measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Profile | None]:
    """Run the command with a measurement that saves what it has and ends so; gives what it was given to resume."""
    (tmp_path / "traces").mkdir()
    monkeypatch.chdir(tmp_path)

    def run(ended: BaseException | Profile, **options: Any) -> Profile | None:
        def measure(*, on_profile: Callable[[Profile], None], **_: object) -> Profile:
            on_profile(measured(complete=False))
            if isinstance(ended, Profile):
                return ended
            raise ended

        fake = Mock(side_effect=measure)
        monkeypatch.setattr("moeplan.profilers.measure.measure", fake)
        with contextlib.suppress(Killed, SystemExit):
            profile_command.profile(timeout=120.0, output=Path("profile.json"), plot=None, **options)
        resumed: Profile | None = fake.call_args.kwargs["resume"]
        return resumed

    return run


@pytest.mark.parametrize("ended", [Killed(), measured(complete=False)])
def test_a_run_that_ends_early_leaves_the_complete_profile_and_resumes_beside_it(measuring: Any, ended: Any) -> None:
    good, path, partial = describe("2x8"), Path("profile.json"), Path("profile.json.partial")
    save(good, path)
    assert measuring(ended) is None
    assert load(path) == good
    assert not load(partial).complete
    assert measuring(measured(), resume=True).series.keys() == measured().series.keys()
    assert load(path).series.keys() == measured().series.keys()
    assert not partial.exists()


def test_an_interrupted_first_profile_is_where_it_was_asked_for(measuring: Any, tmp_path: Path) -> None:
    measuring(measured(complete=False))
    assert not load("profile.json").complete
    assert sorted(path.name for path in tmp_path.iterdir()) == ["profile.json", "traces"]


def test_uneven_exchanges_are_held_against_even_ones_of_the_same_busiest_port() -> None:
    uneven = [{"bytes": 4**power, "sigma_percent": 50} for power in (6, 8, 10)]
    even = [{"bytes": 4**power} for power in range(5, 14)]
    profile = of_series(
        series("all_to_all", 4, "intra", sizes=even, a_s=0, b_s=1e-9),
        series("uneven_all_to_all", 4, "intra", sizes=uneven, a_s=0, b_s=1.5e-9),
    )
    assert "uneven_all_to_all/uint8@4/intra took 1.5 times as long (1.5 to 1.5)" in printed(profile, 200)


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("node.json",), 2, "only given with --merge"),
        (("--merge", "node.json"), 2, "expected two or more"),
        (("--merge", "node.json", "net.json", "-o", "net.json"), 2, "would be overwritten"),
        (("--merge", "node.json", "net.json", "--resume"), 2, "--merge and --resume do different things"),
        (("--cluster", "2x8", "--resume"), 2, "--cluster and --resume"),
        (("--merge", "half.json", "small.json"), 4, "small.json 4"),
        (("--resume", "--quick", "-o", "half.json"), 4, "a grid that is full, this run quick"),
        (("--resume", "-o", "small.json"), 4, "the first described"),
        (("--resume", "-o", "half.json"), 4, "a grid that is full, this run default"),
        (("--quick", "--full"), 2, "--quick and --full ask for different grids"),
        (("--preset", "h200_sxm", "--quick"), 2, "--quick says how to measure this machine, and nothing is measured"),
        (("--cluster", "2x8", "-o", "node.json"), 2, "node.json: a profile (measured, of 2x8) that would be lost;"),
        (("--cluster", "2x8", "--full"), 2, "--full says how to measure this machine"),
        (("--merge", "node.json", "net.json", "--device", "cuda"), 2, "--device says how to measure this machine"),
        (("--from-tables", ".", "--system", "x", "--ranks", "4"), 2, "--ranks says how to measure this machine"),
        (("--from-tables", "."), 2, "does not say whose tables; give --system NAME"),
        (("--system", "h200_sxm"), 2, "does not say where its tables are; give --from-tables DIR"),
        (("--from-tables", ".", "--system", "x", "--cluster", "2x8"), 3, "no system's tables"),
        (("--from-tables", ".", "--system", "x", "--preset", "h200_sxm"), 2, "do different things; give one of them"),
        (("--preset", "h200_sxm", "--merge", "node.json", "net.json"), 2, "--preset and --merge"),
        (("--preset", "h300"), 2, "preset 'h300'; there are h100_sxm, h200_sxm"),
        (("--preset", "h200_sxm", "--cluster", "2x8"), 2, "for example --link inter=50:5"),
        (("--link", "inter=50:5"), 2, "give --cluster NxG, --preset or --from-tables beside it"),
        (("--cluster", "2x8", "--plot", "profile.json"), 2, "--plot profile.json is where a profile is or goes"),
        (("--merge", "node.json", "net.json", "--plot", "net.json"), 2, "is where a profile is or goes"),
    ],
)
def test_what_cannot_be_is_one_clear_line(refuse: Any, tmp_path: Path, words: Any, code: int, told: str) -> None:
    save(measured(), tmp_path / "node.json")
    save(measured(complete=False), tmp_path / "half.json")
    (tmp_path / "net.json").write_text((tmp_path / "node.json").read_text())
    save(describe("2x4"), tmp_path / "small.json")
    refuse("profile", *words, cwd=tmp_path, code=code, words=told)


@pytest.mark.parametrize(
    ("cluster", "links", "lacking"),
    [
        ("2x4", [], "link intra and inter not given"),
        ("2x4", ["intra=100:2"], "link inter not given"),
        ("2x1", ["inter=10:5"], None),
        ("1x4", ["intra=100:2"], None),
    ],
)
def test_a_described_cluster_names_the_links_that_it_lacks(cluster: str, links: list[str], lacking: str | None) -> None:
    notes = [*profile_command._unlinked(Cluster.parse(cluster, links))]
    assert len(notes) == (lacking is not None)
    if lacking is not None:
        assert notes[0].startswith(lacking)
        flags = " ".join(f"--link {kind}=GBps:us" for kind in ("intra", "inter") if kind in lacking)
        assert notes[0].endswith(f"give {flags}")


def test_a_preset_is_a_profile_of_the_cluster_asked_for_and_says_that_attention_was_not_measured(
    moeplan: Any, tmp_path: Path
) -> None:
    words = ("--preset", "h200_sxm", "--cluster", "2x4", "--link", "inter=50:5", "--plot", "fits.html")
    done = moeplan("profile", *words, "-o", "h200.json", cwd=tmp_path)
    written = load(tmp_path / "h200.json")
    assert (str(written.cluster), written.link_origins) == ("2x4", {"intra": 0, "inter": 2})
    assert re.search(r"attention/bf16 +roofline +not measured", done.stdout)
    assert "attention by a roofline, not measured" in done.stdout
    experts = known(written.series["expert_ffn/fp8"].fit).held_out["experts"]
    assert re.search(rf"expert_ffn/fp8 .* {percent(experts.p95_error)}\n", done.stdout)
    told = " ".join(done.stdout.split())
    assert f"Furthest off: expert_ffn/fp8, {percent(experts.worst_error)} at tokens 1,920, experts 512" in told
    assert "roofline, not measured" in (tmp_path / "fits.html").read_text()
    assert done.stdout.splitlines()[-1].endswith("--profile h200.json")


def test_no_size_is_named_where_all_are_predicted_well() -> None:
    assert "Furthest off" not in printed(measured(), 400)


def test_tables_cluster_and_links_go_together_in_one_command(moeplan: Any, tmp_path: Path) -> None:
    write(tmp_path / "data", NCCL, nccl())
    words = ("--from-tables", "data", "--system", "x100", "--cluster", "2x4", "--link", "inter=50:5")
    moeplan("profile", *words, "-o", "net.json", cwd=tmp_path)
    placed = load(tmp_path / "net.json")
    assert (str(placed.cluster), placed.link_origins) == ("2x4", {"intra": 0, "inter": 1})
    assert placed.cluster.links["inter"].s_per_byte == pytest.approx(1 / 50e9)
    assert {"all_to_all/uint8@4/intra", "all_gather/uint8@4/intra"} & {*placed.series}
    done = moeplan("profile", *words, "--link", "intra=100:2", "-o", "given.json", cwd=tmp_path)
    assert f"{len(placed.series)} curves are left out: the link that they crossed is as given" in done.stdout
    given = load(tmp_path / "given.json")
    assert given.cluster.links["intra"].s_per_byte == pytest.approx(1 / 100e9)
    assert not [key for key in given.series if key.endswith("/intra")]


def test_the_list_of_presets_names_gpu_memory_node_dtypes_and_source(moeplan: Any, tmp_path: Path) -> None:
    text = moeplan("profile", "--preset", "list", cwd=tmp_path).stdout
    assert "NVIDIA H100 SXM" in text
    assert re.search(r"h200_sxm +NVIDIA H200 SXM +141 GB +1x8 +bf16, fp8", text)
    assert "h200_sxm  h200_sxm: nccl 2.29.2, gemm vllm 0.19.0" in text  # a library of its own name is named once
    assert max(map(len, text.splitlines())) <= 100
    (_, row) = json.loads(moeplan("profile", "--preset", "list", "--json", cwd=tmp_path).stdout)["presets"]
    assert (row["preset"], row["memory_gb"], row["node"]) == ("h200_sxm", 141, "1x8")
    assert {"expert_ffn", "all_to_all", "all_gather", "gemm"} <= {*row["measured"]}
    assert "attention" not in row["measured"]
    assert not [*tmp_path.iterdir()]


def test_a_profile_whose_fit_gives_no_time_is_neither_drawn_nor_saved(refuse: Any, tmp_path: Path) -> None:
    steep = Piecewise(works=(1.0, 1.0 + 1e-15), seconds_at=(1e-12, 8e4), kind="piecewise_linear")
    (one, *_) = measured().series.values()
    wide = dataclasses.replace(known(one.fit), model=steep, measured={"bytes": (1, 2**60)})
    save(of_series(one.model_copy(update={"fit": wide})), tmp_path / "a.json")
    merge = ("profile", "--merge", "a.json", "a.json", "-o", "o.json", "--plot", "p.html")
    refuse(*merge, cwd=tmp_path, code=3, words="predicts no time")


def test_progress_is_lines_with_the_time_to_go_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = Measurement.of({"bytes": 8}, 8, [1.0] * 6)
    step = Step(Place("all_to_all", "uint8", 4, "intra", (("bytes", 8),)), one, 1e-3, 3, 9, 75.4)
    with screen.step_progress() as tell:
        tell(step)
        assert capsys.readouterr().err == ""
    monkeypatch.setattr(screen, "LINE_S", 0.0)
    with screen.step_progress() as tell:
        tell(step)
    assert capsys.readouterr().err == "moeplan: 3 of 9 sizes, 1:15 left (all_to_all/uint8@4/intra)\n"
