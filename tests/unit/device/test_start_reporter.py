"""Each stage is reported as it begins, and what it has done from time to time."""

from __future__ import annotations

from bottega.device.start_reporter import StartReporter
from bottega.plain_text import progress_text


def test_a_stage_is_reported_as_it_begins_and_at_most_twice_a_second() -> None:
    sent: list[tuple[str, int, int]] = []
    now_s = 100.0
    reporter = StartReporter(lambda *progress: sent.append(progress), clock=lambda: now_s)
    reporter.begin("loading unet", 1000)
    for _ in range(10):
        now_s += 0.25
        reporter.advance(100)
    reporter.begin("warming up")
    reporter.advance()
    assert sent == [
        ("loading unet", 0, 1000),
        *(("loading unet", done, 1000) for done in range(200, 1001, 200)),
        ("warming up", 0, 0),
    ]


def test_progress_is_said_in_the_unit_of_the_whole() -> None:
    assert progress_text("loading unet", 3_100_000_000, 5_140_000_000) == "loading unet, 3.1 of 5.1 GB"
    assert progress_text("loading vae", 5_000_000, 167_000_000) == "loading vae, 5.0 of 167.0 MB"
    assert progress_text("hashing", 12, 10) == "hashing, 0.0 of 0.0 MB"
    assert progress_text("warming up", 0, 0) == "warming up"
