"""The bench of kernels: all of it runs and it names a wrong kernel; and kernels as they are compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bottega.kernels import bench, geglu, guided_euler
from bottega.kernels.bench import main, measure
from bottega.kernels.kernel import difference


@pytest.fixture(autouse=True)
def _one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times mean nothing in an interpreter."""
    monkeypatch.setattr(bench, "_CPU_RUNS", 1)


def test_on_a_cpu_every_kernel_agrees_with_float64_at_a_small_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--dtype", "float32"]) == 0
    table = capsys.readouterr().out
    facts = json.loads(table.splitlines()[-1])
    assert len({each["name"].split()[0] for each in facts["kernels"]}) == 8
    assert all(each["agrees"] and each["kernel_us"] > 0 and each["moved_bytes"] > 0 for each in facts["kernels"])
    assert all(each["name"] in table for each in facts["kernels"])


def test_a_kernel_that_is_wrong_is_said_to_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return geglu.reference(x) * 1.01

    monkeypatch.setattr(geglu, "geglu", wrong)
    monkeypatch.setattr(bench, "_modules", lambda: (geglu, guided_euler))
    assert main(["--device", "cpu", "--dtype", "float32"]) == 1
    named = [line for line in capsys.readouterr().out.splitlines() if "above" in line]
    assert len(named) == len(geglu.cases(torch.device("cpu"), torch.float32, small=True))
    assert all("geglu" in line for line in named)


@pytest.mark.parametrize("made", [[torch.tensor([1.0, float("nan")])], [torch.tensor([float("nan"), 2.0])]])
def test_nan_agrees_with_nothing(made: Sequence[Tensor]) -> None:
    apart = difference(made, [torch.tensor([1.0, 2.0])])
    assert not apart <= 1e9


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_on_a_gpu_every_kernel_agrees_with_float64_at_the_sizes_of_sdxl(dtype: torch.dtype) -> None:
    wrong = [each for each in measure(torch.device("cuda"), dtype) if not each.agrees]
    assert not wrong


def test_every_kernel_is_compiled_for_maps_of_one_element_too(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.support.kernel_compiling"]
    made = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
