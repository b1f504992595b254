"""The element type that a model computes in where nobody says one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bottega.miniature import WEIGHTS
from bottega.model import dtype as dtypes
from bottega.model.dtype import ProbeTimes, files_dtype, pick_dtype, probe_times
from bottega.model_files import ModelReport, check_model_folder
from tests.samples.published import Layout, published_model

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
BFLOAT16_IS_FASTER = ProbeTimes(float32_s=1.0, bfloat16_s=0.4)
BFLOAT16_IS_SLOWER = ProbeTimes(float32_s=1.0, bfloat16_s=7.0)
ABOUT_ALIKE = ProbeTimes(float32_s=1.0, bfloat16_s=1.1)


def report(folder: Path) -> ModelReport:
    return check_model_folder(folder)


def half() -> ModelReport:
    """Of a model whose files are float16, as most published ones are."""
    return report(published_model(Layout(variants=("fp16",))))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the probe says, where it is asked."""
    probe = SimpleNamespace(times=BFLOAT16_IS_FASTER, asked=0)

    def answer() -> ProbeTimes:
        probe.asked += 1
        assert isinstance(probe.times, ProbeTimes)
        return probe.times

    monkeypatch.setattr(dtypes, "probe_times", answer)
    return probe


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_files_in_float32_are_computed_in_float32_and_nothing_is_measured(
    device: torch.device, measured: SimpleNamespace
) -> None:
    assert pick_dtype("auto", report(published_model()), device) == torch.float32
    assert measured.asked == 0


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_a_preset_says_what_its_model_computes_in_and_an_operator_has_the_last_word(
    device: torch.device, measured: SimpleNamespace
) -> None:
    embedded = report(WEIGHTS)
    assert files_dtype(embedded) == torch.float16, "to be small"
    assert pick_dtype("auto", embedded, device) == torch.float32
    assert pick_dtype("bfloat16", embedded, device) == torch.bfloat16
    assert measured.asked == 0


def test_files_in_half_precision_are_computed_as_they_are_on_a_gpu(measured: SimpleNamespace) -> None:
    assert files_dtype(half()) == torch.float16
    assert pick_dtype("auto", half(), GPU) == torch.float16
    assert measured.asked == 0


@pytest.mark.parametrize(
    ("times", "wanted"),
    [(BFLOAT16_IS_FASTER, torch.bfloat16), (BFLOAT16_IS_SLOWER, torch.float32), (ABOUT_ALIKE, torch.bfloat16)],
    ids=["bfloat16 is faster", "bfloat16 is slower", "about alike"],
)
def test_files_in_half_precision_are_computed_in_what_a_cpu_is_faster_in(
    times: ProbeTimes, wanted: torch.dtype, measured: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    measured.times = times
    assert pick_dtype("auto", half(), CPU) == wanted
    said = vars(caplog.records[-1])
    assert (said["files"], said["dtype"]) == ("float16", str(wanted).removeprefix("torch."))
    assert "times as long as float32 on this CPU" in said["why"]


def test_float32_is_not_chosen_where_there_is_no_memory_for_it(
    measured: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured.times = BFLOAT16_IS_SLOWER
    needed = 4 * sum(part.parameters for part in half().parts.values())
    monkeypatch.setattr(dtypes, "available_bytes", lambda: needed)
    assert pick_dtype("auto", half(), CPU) == torch.bfloat16
    assert measured.asked == 0


def test_float16_on_a_cpu_is_taken_where_it_is_said_and_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assert pick_dtype("float16", half(), CPU) == torch.float16
    assert "float16 is many times slower" in caplog.text
    caplog.clear()
    assert pick_dtype("float16", half(), GPU) == torch.float16
    assert pick_dtype("bfloat16", half(), CPU) == torch.bfloat16
    assert not caplog.records


def test_the_probe_measures_both_element_types() -> None:
    times = probe_times()
    assert 0 < times.float32_s < 10
    assert 0 < times.bfloat16_s < 10
