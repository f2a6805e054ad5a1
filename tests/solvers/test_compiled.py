import subprocess
import sys
from pathlib import Path

import moeplan.solvers.compiled

SCRIPT = "from changing.caller import value; value(); print(value(), sum(value.stats.cache_hits.values()))"
CALLER = "from .compiled import compiled\nfrom .callee import called\n@compiled\ndef value():\n    return called()\n"
CALLEE = "from .compiled import compiled\n@compiled\ndef called():\n    return {}\n"


def test_a_changed_function_in_another_file_is_compiled_into_its_callers_anew(tmp_path: Path) -> None:
    folder = tmp_path / "changing"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "compiled.py").write_text(Path(moeplan.solvers.compiled.__file__).read_text())
    (folder / "caller.py").write_text(CALLER)
    told = []
    for value in (1, 2):
        (folder / "callee.py").write_text(CALLEE.format(value))
        for _ in range(2):
            run = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, check=True)
            told.append(run.stdout.decode().split())
    assert told == [["1", "0"], ["1", "1"], ["2", "0"], ["2", "1"]]
