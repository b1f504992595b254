"""Every bench runs in its smallest form, and reports figures."""

from __future__ import annotations

import importlib
import json
import math
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from load.bench import framework
from load.bench.framework import Bench

_FOLDER = Path(framework.__file__).parent
NAMES = sorted(path.stem for path in _FOLDER.glob("*.py") if "\nBENCH = Bench(" in path.read_text(encoding="utf-8"))
# Each of the others takes more than some seconds.
QUICK = {"controlnet_cache"}
# Further options of some, which have another way to run.
OTHER_RUNS = (
    *("controlnet --topology sd3", "controlnet --topology flux", "edit --topology sd3", "edit --topology flux"),
    "mixed_sizes --topology flux",
)
# They write a sheet of pictures, or a page.
FILES = {
    "controlnet_follow": "--sheet",
    "day": "--page",
    "edit_quality": "--sheet",
    "lora_styles": "--sheet",
    "miniature": "--sheet",
}
_TIMEOUT_S = 600.0


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Restore what a bench does with SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.timeout(_TIMEOUT_S)
@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=() if run in QUICK else pytest.mark.slow) for run in (*NAMES, *OTHER_RUNS)]
)
def test_a_smallest_run_reports_figures(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(framework.RECORD, raising=False)
    name, *options = run.split()
    bench: Bench = importlib.import_module(f"load.bench.{name}").BENCH
    file = [FILES[name], str(tmp_path / "file")] if name in FILES else []
    if name in FILES and FILES[name] == "--sheet":
        file[1] += ".png"
    # Beside other tests a bar may be missed, or requests go out late.
    assert bench.main(["--smallest", *options, *file]) in {0, 1}
    _assert_figures(bench, capfd.readouterr().out)


def _assert_figures(bench: Bench, out: str) -> None:
    lines = [line for line in out.splitlines() if line.startswith("{")]
    assert lines
    for line in lines:
        figures = json.loads(line)
        assert figures.pop("bench").startswith(bench.name)
        assert figures
        assert all(isinstance(value, int | float) and not math.isnan(value) for value in figures.values())
