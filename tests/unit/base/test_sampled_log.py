"""Lines that others cause at will: a few of each kind, and how many more there were."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from bottega.rpc.operation import logs
from bottega.sampled_log import LINES_PER_SECOND, SampledLog
from tests.support.waiting import wait_until

_log = logging.getLogger("crowd")
CROWD = 500


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[SampledLog]:
    caplog.set_level(logging.INFO)
    made = SampledLog(_log, "came", more="more came", counted="guests")
    yield made
    made.sum_up()


def _told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records]


def _guests(caplog: pytest.LogCaptureFixture) -> int:
    lines = caplog.records
    return sum(1 if line.message == "came" else int(line.__dict__["guests"]) for line in lines)


def test_a_crowd_from_many_threads_is_a_few_lines_and_its_number(
    log: SampledLog, caplog: pytest.LogCaptureFixture
) -> None:
    def come() -> None:
        for _ in range(CROWD // 5):
            log.log_event()

    threads = [threading.Thread(target=come) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    log.sum_up()
    assert len(caplog.records) <= 4 * LINES_PER_SECOND  # in two or three of its seconds, on a busy machine
    assert _guests(caplog) == CROWD


def test_it_sums_up_by_itself_and_without_the_fields_of_whoever_it_counts(
    log: SampledLog, caplog: pytest.LogCaptureFixture
) -> None:
    bound: dict[str, set[str]] = {}

    def note(record: logging.LogRecord) -> bool:
        bound.setdefault(record.getMessage(), set()).update(logs.bound().values())
        return True

    def come() -> None:
        logs.bind(request_id="one of them")
        for _ in range(CROWD):
            log.log_event()

    caplog.handler.addFilter(note)
    try:
        crowd = threading.Thread(target=come)
        crowd.start()
        crowd.join(10)
        wait_until(lambda: _guests(caplog) == CROWD, "all of them to be counted")
    finally:
        caplog.handler.removeFilter(note)
    assert bound == {"came": {"one of them"}, "more came": set()}


def test_kinds_are_counted_apart_and_a_rare_one_is_not_hidden(
    log: SampledLog, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(CROWD):
        log.log_event({"by": "memfd"})
    log.log_event({"by": "tcp"}, {"why": "its proof is wrong"})
    assert [line.__dict__["why"] for line in caplog.records if line.__dict__["by"] == "tcp"] == ["its proof is wrong"]
    log.sum_up()
    assert {line.__dict__["by"] for line in caplog.records if line.message == "more came"} == {"memfd"}


def test_callers_that_are_all_of_another_kind_are_bounded_too(
    log: SampledLog, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(20 * CROWD):
        log.log_event({"by": str(number)})
    log.sum_up()
    assert len(caplog.records) < CROWD
    assert _guests(caplog) == 20 * CROWD


def test_few_are_told_one_by_one_and_summed_up_by_nobody(log: SampledLog, caplog: pytest.LogCaptureFixture) -> None:
    log.log_event()
    log.sum_up()
    log.sum_up()
    assert _told(caplog) == ["came"]
