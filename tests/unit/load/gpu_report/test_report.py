"""What the report says: table, JSON and bars; and its parts at a small size on a CPU."""

from __future__ import annotations

import json
import math
from collections.abc import Set as AbstractSet
from pathlib import Path

import PIL.Image
import pytest

from load.gpu_report.__main__ import BARS, main
from load.gpu_report.parts import PARTS, Part
from load.gpu_report.report import Figure, Outcome, json_of, table_of

GOOD = Figure(name="ratio", label="times as fast", value=1.5, unit="x", group="g", at_least=1.24)
BAD = Figure(name="added_ms", label="added", value=31.0, unit="ms", group="g", at_most=20.0)
NONE = Figure(name="psnr", label="off", value=math.nan, unit="dB", group="g", at_least=40.0)
FOUND = {
    "picture": Outcome(part="picture", status="measured", seconds=2.0, setting={}, figures=(GOOD, BAD, NONE)),
    "loras": Outcome(part="loras", status="left out", seconds=0.0, setting={}, why="PEFT is not installed"),
    "suite": Outcome(part="suite", status="failed", seconds=1.0, setting={}, why="Traceback\nKeyError: 'x'"),
    "edits": None,
}
SHOWN = [Part(name=name, question="?", measure="") for name in FOUND]
# What starts processes, or needs a GPU. Its calls are tried by tests/e2e.
_APART = {"tests", "suite"}
# What compiles Diffusers' side.
_LONG = {"compiled", "batches-compiled"}


def test_what_misses_what_was_wanted_is_said_in_table_and_json() -> None:
    lines = "\n".join(table_of(SHOWN, FOUND, {"gpu": "H200"}))
    assert "1.50 x" in lines
    assert "at least 1.24\n" in lines
    assert "at most 20  MISSED" in lines
    assert "[loras: left out: PEFT is not installed]" in lines
    assert "[edits: not run]" in lines
    said = json.loads(json_of(SHOWN, FOUND, {"gpu": "H200"}))
    assert (said["bench"], said["gpu"], said["ratio"], said["psnr"]) == ("gpu-report", "H200", 1.5, None)
    assert said["missed"] == ["added_ms", "psnr"]
    assert said["left_out"] == {"loras": "PEFT is not installed"}
    assert said["failed"] == {"suite": "KeyError: 'x'"}
    assert said["not_run"] == ["edits"]


@pytest.mark.slow
@pytest.mark.parametrize("apart", [_APART | _LONG, _APART], ids=["in short", "in full"])
def test_a_small_report_measures_its_parts_and_keeps_them(
    apart: AbstractSet[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--small", "--folder", str(tmp_path), *(part.name for part in PARTS if part.name not in apart)]
    assert main(arguments) == 0
    said = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (said["failed"], said["not_run"], said["missed"]) == ({}, [], [])
    assert not said["left_out"].keys() - {"kernels"}  # where Triton is not installed
    compiled = ["ratio_vs_compiled"] if "compiled" not in apart else []
    for name in ("ratio_vs_eager", *compiled, "patch_ms_4", "edit_19", "decode_psnr_db", "eager_mfu"):
        assert said[name] > 0
    assert {f"step_{count}_controlnets_{side}_ms" for count in (0, 1) for side in ("ours", "eager")} <= said.keys()
    assert said["edit_19_reused"] > 0
    with PIL.Image.open(tmp_path / BARS) as bars:
        assert bars.width > 0

    assert main(arguments) == 0
    assert "picture: measured before" in capfd.readouterr().out


@pytest.mark.slow
def test_a_small_report_of_the_whole_suite(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--small", "--folder", str(tmp_path), "model", "suite"]) == 0
    said = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert said["step_1_controlnets_server_ms"] > 0
    assert (said["controlnet_links_memfd"], said["controlnet_transfer_ms"] > 0) == (1, True)
    assert said["cache_off_s"] > 0
