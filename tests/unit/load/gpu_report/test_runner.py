"""Parts of the report: cut off, hanging, failing, and gone on with by the next run."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from load.gpu_report.parts import Part
from load.gpu_report.report import Figure, Outcome, Results
from load.gpu_report.runner import PartProcesses, run_parts
from tests.support.waiting import wait_until

SETTING = {"gpu": "none", "code": "1"}
FAST, SLOW, LAST = (Part(name=name, question=f"{name}?", measure="") for name in ("fast", "slow", "last"))


def outcome(part: Part, **said: object) -> Outcome:
    plain: dict[str, object] = {"status": "measured", "seconds": 1.0, "setting": SETTING}
    return Outcome(part=part.name, **{**plain, **said})  # type: ignore[arg-type]


def test_what_was_measured_before_is_not_measured_again_and_what_failed_is(tmp_path: Path) -> None:
    results, ran = Results(tmp_path, SETTING), list[str]()
    results.put(outcome(FAST, figures=(Figure(name="a", label="A", value=math.nan),)))
    results.put(outcome(SLOW, status="failed", why="no memory"))

    def run(part: Part) -> Outcome:
        ran.append(part.name)
        return outcome(part)

    run_parts((FAST, SLOW, LAST), results, run, told=lambda _: None)
    assert ran == ["slow", "last"]
    kept = results.get("fast")
    assert kept is not None
    assert math.isnan(kept.figures[0].value)


def test_a_part_that_hangs_is_ended_with_what_it_started_and_the_others_go_on(tmp_path: Path) -> None:
    results, pids = Results(tmp_path, SETTING), tmp_path / "pid"
    hang = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        f"open({str(pids)!r}, 'w').write(str(child.pid)); time.sleep(600)"
    )

    def command(part: Part) -> Sequence[str]:
        return [sys.executable, "-c", hang if part is SLOW else "raise SystemExit(3)"]

    run_parts((SLOW, LAST), results, PartProcesses(results, command, longest_s=2.0, grace_s=0.3), told=lambda _: None)
    hung, ended = results.get("slow"), results.get("last")
    assert hung is not None
    assert (hung.status, hung.why) == ("failed", "it was ended after 2 s")
    assert ended is not None
    assert (ended.status, ended.why) == ("failed", "its process ended with 3 and without an outcome")
    wait_until(lambda: not psutil.pid_exists(int(pids.read_text())), "the child to end")
