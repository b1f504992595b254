"""A stage of an engine's start is logged where it takes long, and all of them are told to systemd."""

from __future__ import annotations

import asyncio

import pytest

from bottega.process import StartProgress
from bottega.worker import engine_client
from bottega.worker.engine_client import StartMonitor

LOADING = StartProgress(stage="loading unet", done_bytes=31 * 10**8, total_bytes=51 * 10**8)


async def test_a_stage_that_takes_long_is_logged_again_and_again_with_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_client, "_QUIET_S", 0.1)
    monkeypatch.setattr(engine_client, "_REPEAT_S", 0.1)
    caplog.set_level("INFO")
    extended: list[str] = []
    start = StartMonitor(extended.append)
    start.note(LOADING)
    await asyncio.sleep(0.35)
    start.note(StartProgress(stage="warming up"))
    seconds = start.end()
    await asyncio.sleep(0.2)
    logged = [vars(record)["progress"] for record in caplog.records]
    assert set(logged) == {"loading unet, 3.1 of 5.1 GB"}
    assert 2 <= len(logged) <= 3
    assert extended == ["loading unet, 3.1 of 5.1 GB", "warming up"]
    assert list(seconds) == ["starting the engine", "loading unet", "warming up"]
    assert seconds["loading unet"] >= 0.35


async def test_a_quick_start_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    start = StartMonitor(lambda _: None)
    start.note(LOADING)
    start.end()
    assert start.end().keys() == {"starting the engine", "loading unet"}
    assert not caplog.records
