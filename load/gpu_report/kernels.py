"""The kernels' own bench, in a process of its own: whether they are interpreted is decided when they are imported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from load.gpu_report.figures import Figure
from load.gpu_report.rig import Rig, need

_LONGEST_S = 450.0


def measure(rig: Rig) -> Sequence[Figure]:
    """Raises LeftOutError without Triton, RuntimeError where the bench ends without its line of JSON."""
    need("triton", "Triton")
    command = [sys.executable, "-m", "bottega.kernels.bench", "--device", rig.device, "--dtype", rig.size.dtype]
    # It ends with 1 where a kernel is not as close as it should be, which is a figure here.
    bench = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_LONGEST_S, check=False)
    print(bench.stdout, end="")
    lines = bench.stdout.splitlines()
    if not lines or not lines[-1].startswith("{"):
        raise RuntimeError(f"the kernels' bench ended with {bench.returncode}")
    return figures_of(rig, json.loads(lines[-1])["kernels"])


def figures_of(rig: Rig, kernels: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """Of each case how many times as fast as its reference it is, and how far from float64."""
    figures = []
    for each in kernels:
        name = re.sub(r"[^a-z0-9]+", "_", str(each["name"]).lower()).strip("_")
        about = f"{each['kernel_us']:.0f} us, {each['moved_bytes'] / each['kernel_us'] / 1e3:.0f} GB/s"
        figures.append(
            Figure(
                name=f"kernel_{name}",
                label=f"{each['name']} ({about})",
                value=each["reference_us"] / each["kernel_us"],
                unit="x",
                group="Kernels, times as fast as their references" if rig.on_gpu else "",
            )
        )
        figures.append(
            Figure(
                name=f"kernel_{name}_off",
                label="  from float64, over the tolerance",
                value=each["kernel_difference"] / each["tolerance"],
                at_most=1.0,
            )
        )
    return figures
