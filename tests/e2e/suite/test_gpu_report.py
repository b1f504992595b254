"""What the GPU report asks of a suite works on any."""

from __future__ import annotations

from pathlib import Path

import pytest

from bottega.client import Client
from load.gpu_report.rig import SMALL_SIZE, Rig
from load.gpu_report.suite import Bench


def test_what_the_suite_adds_is_measured_from_a_picture_and_its_provenance(client: Client, tmp_path: Path) -> None:
    bench = Bench(rig=Rig(size=SMALL_SIZE, device="cpu", folder=tmp_path), client=client)
    figures = {figure.name: figure.value for figure in bench.added(alone_s=0.0)}
    assert 0 < figures["encode_image_ms"] < 1e3 * figures["suite_s"]
    assert figures["added_ms"] + figures["encode_image_ms"] == pytest.approx(1e3 * figures["suite_s"])
