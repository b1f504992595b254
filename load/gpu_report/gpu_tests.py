"""The tests that need a GPU: how many pass."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

from load.gpu_report.figures import Figure
from load.gpu_report.rig import LeftOutError, Rig, need

# Below the longest that a part may take.
_LONGEST_S = 450.0
_ROOT = Path(__file__).parents[2]


def measure(rig: Rig) -> Sequence[Figure]:
    """Raises LeftOutError without a GPU, RuntimeError where pytest cannot collect them."""
    if not rig.on_gpu:
        raise LeftOutError("they need a CUDA device")
    need("pytest", "pytest")
    need("pytest_asyncio", "pytest-asyncio")
    report = rig.folder / "tests.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}"]
    subprocess.run(command, cwd=_ROOT, timeout=_LONGEST_S, check=False)
    if not report.is_file():
        raise RuntimeError("pytest has written no report; what it says stands above")
    return figures_of(rig, report.read_text(encoding="utf-8"))


def figures_of(rig: Rig, report: str) -> Sequence[Figure]:
    """report: JUnit's XML, as pytest writes it; it is our own. Those that failed are printed by name."""
    suite = ET.fromstring(report).find("testsuite")
    if suite is None:
        raise RuntimeError("pytest's report has no testsuite")
    counts = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    for case in suite.iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            print(f"FAILED {case.get('classname')}::{case.get('name')}")
    passed = counts["tests"] - failed - counts["skipped"]
    return [
        Figure(name="gpu_tests_passed", label="passed", value=passed),
        Figure(name="gpu_tests_skipped", label="skipped", value=counts["skipped"]),
        rig.wanted(Figure(name="gpu_tests_failed", label="failed", value=failed, at_most=0)),
    ]
