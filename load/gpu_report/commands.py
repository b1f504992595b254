"""Parts that are commands of their own: the tests that need a GPU, and the kernels' bench."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from load.gpu_report.report import Figure
from load.gpu_report.rig import LeftOutError, Rig, need

# Below the longest that a part may take.
_LONGEST_S = 450.0
_ROOT = Path(__file__).parents[2]


def measure_tests(rig: Rig) -> Sequence[Figure]:
    """Run the tests that need a GPU.

    Raises LeftOutError without a GPU, and RuntimeError where pytest cannot collect them.
    """
    if not rig.on_gpu:
        raise LeftOutError("they need a CUDA device")
    need("pytest", "pytest")
    need("pytest_asyncio", "pytest-asyncio")
    report = rig.folder / "tests.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}"]
    subprocess.run(command, cwd=_ROOT, timeout=_LONGEST_S, check=False)
    if not report.is_file():
        raise RuntimeError("pytest has written no report; the reason is in the lines above")
    return figures_of_tests(rig, report.read_text(encoding="utf-8"))


def figures_of_tests(rig: Rig, report: str) -> Sequence[Figure]:
    """Return the counts of pytest's JUnit XML, and print the names of the tests that failed."""
    suite = ET.fromstring(report).find("testsuite")
    if suite is None:
        raise RuntimeError("pytest's report has no testsuite")
    counts = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    for case in suite.iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            print(f"FAILED {case.get('classname')}::{case.get('name')}")
    return [
        Figure("gpu_tests_passed", "passed", counts["tests"] - failed - counts["skipped"]),
        Figure("gpu_tests_skipped", "skipped", counts["skipped"]),
        rig.wanted(Figure("gpu_tests_failed", "failed", failed, at_most=0)),
    ]


def measure_kernels(rig: Rig) -> Sequence[Figure]:
    """Run the kernels' bench, in a process of its own: when they are imported, it is decided whether to interpret them.

    Raises LeftOutError without Triton, and RuntimeError where the bench ends without its line of JSON.
    """
    need("triton", "Triton")
    command = [sys.executable, "-m", "bottega.kernels.bench", "--device", rig.device, "--dtype", rig.size.dtype]
    # It ends with 1 where a kernel is not as close as it should be, which is a figure here.
    bench = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_LONGEST_S, check=False)
    print(bench.stdout, end="")
    lines = bench.stdout.splitlines()
    if not lines or not lines[-1].startswith("{"):
        raise RuntimeError(f"the kernels' bench ended with {bench.returncode}")
    return figures_of_kernels(rig, json.loads(lines[-1])["kernels"])


def figures_of_kernels(rig: Rig, kernels: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """Return for each case how many times as fast as its reference it is, and how far from float64."""
    group = "Kernels, times as fast as their references" if rig.on_gpu else ""
    figures = []
    for each in kernels:
        name = re.sub(r"[^a-z0-9]+", "_", str(each["name"]).lower()).strip("_")
        label = f"{each['name']} ({each['kernel_us']:.0f} us, {each['moved_bytes'] / each['kernel_us'] / 1e3:.0f} GB/s)"
        off = each["kernel_difference"] / each["tolerance"]
        figures += [
            Figure(f"kernel_{name}", label, each["reference_us"] / each["kernel_us"], "x", group),
            Figure(f"kernel_{name}_off", "  from float64, over the tolerance", off, at_most=1.0),
        ]
    return figures
