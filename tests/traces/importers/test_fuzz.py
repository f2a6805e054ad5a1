"""A thousand mutated recordings: each is imported or refused in one line, and nothing is left, grows or hangs."""

import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeplan.errors import MoeplanError
from moeplan.traces.count_form import open_any
from moeplan.traces.importers import IMPORTERS, import_trace
from tests.traces.importers.mutations import mutants
from tests.traces.importers.recordings import (
    config,
    distinct_ids,
    megatron,
    npy,
    npz,
    openai_response,
    per_pass,
    per_token,
    physical_map,
    sglang_response,
    stat,
    tensorrt,
    vllm_response,
    write,
)

EACH = 92  # of eleven kinds
MOST_BYTES = 192 * 2**20
H, E, K = 4, 6, 2
RNG = np.random.default_rng(0)
IDS = distinct_ids(RNG, (2, 3, H, 5), E, K)
COUNTS = RNG.integers(1, 99, (2, 3, H, E))
MAP = physical_map(RNG, H, E, 0)


def tokens() -> list[dict[str, Any]]:
    cells = enumerate(IDS[0, 0].transpose(1, 0, 2).tolist())
    return [{"sample": 1, "position": place, "experts": experts, "step": 3} for place, experts in cells]


def lines() -> list[Any]:
    """Responses of every kind."""
    sequences = IDS.transpose(0, 1, 3, 2, 4).reshape(6, 5, H, K)
    raw = [sglang_response(sequences[0]), openai_response(sequences[1]), [sglang_response(sequences[2])]]
    return [*raw, vllm_response(sequences[3].astype(np.uint8)), vllm_response(sequences[4], sequences[5])]


KINDS: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "stat": ("sglang", lambda: stat(COUNTS[0], rows=5, begin=3)),
    "per_pass": ("sglang", lambda: per_pass(COUNTS, MAP)),
    "per_token": ("sglang", lambda: per_token(IDS, MAP)),
    "responses": ("responses", lambda: {"r.jsonl": lines()}),
    "tensorrt_llm": ("tensorrt_llm", lambda: tensorrt(COUNTS, [0, 1, 2, 3], K)),
    "megatron": ("megatron", lambda: megatron(IDS, [0, 1, 2, 3])),
    "npz": ("numpy", lambda: {"r.npz": npz(expert_ids=IDS[0, 0], pos=np.arange(H), seq_id=np.arange(H))}),
    "npz of counts": ("numpy", lambda: {"r.npz": npz(counts=np.full((3, H, E), K), n_tokens=np.full(3, E))}),
    "npy": ("numpy", lambda: {"r.npy": npy(IDS[0, 0, 0])}),
    "json_lines": ("json_lines", lambda: {"r.jsonl": [{"model": {"num_experts": E}}, *tokens()]}),
    "csv": ("csv", lambda: {"r.csv": b"layer,expert,count,step\n" + b"0,1,5,0\n1,2,7,1\n0,3,1,1\n" * 5}),
}


def test_all_importers_are_fuzzed() -> None:
    assert {importer for importer, _ in KINDS.values()} == IMPORTERS.keys()
    assert EACH * len(KINDS) >= 1000


@pytest.mark.parametrize("kind", KINDS)
def test_mutated_recordings_are_imported_or_refused_in_one_line_and_leave_nothing(tmp_path: Path, kind: str) -> None:
    importer, make = KINDS[kind]
    files = {path.name: path.read_bytes() for path in write(tmp_path / "whole", make()).iterdir()}
    config_path = write(tmp_path, {"config.json": config(H, 0, E, K)}) / "config.json"
    configs = [config_path if kind == "responses" else None, config_path]
    assert import_trace(tmp_path / "whole", tmp_path / "trace", hf_config=configs[0]).importer == importer
    before, refusals = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for number, mutant in enumerate(mutants(files, seed=len(kind), count=EACH)):
        place = tmp_path / "place"
        folder = write(place / "in", mutant)
        source = folder if len(files) > 1 else folder / next(iter(files))
        began = time.process_time()
        try:
            import_trace(source, place / "out", hf_config=configs[number % 2])
            open_any(place / "out")
        except MoeplanError as error:
            refusals.append(str(error))
            left = [found.name for found in place.iterdir()]
            assert left == ["in"], refusals[-1]
        assert time.process_time() - began < 5, refusals[-1:]
        shutil.rmtree(place)
    assert not any("\n" in line or len(line) > 1000 for line in refusals)
    assert len(refusals) > EACH // 4  # the changes are no harmless ones
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST_BYTES
