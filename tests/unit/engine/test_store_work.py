"""Where the parts of a store's work stand in a trace: by its durations, and by this process's clock alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.engine.spans import TracedSpan
from bottega.engine.store_work import StoreWork
from bottega.v1.trace_pb2 import StoreTimes

PARTS = [field.name for field in StoreTimes.DESCRIPTOR.fields]
SECONDS = st.floats(0.0, 86_400.0)


def work(times: StoreTimes, answered_s: float = 12.0, sent_s: float | None = None) -> StoreWork:
    return StoreWork(store="s", times=times, asked_s=10.0, answered_s=answered_s, sent_s=sent_s)


def placed(spans: list[TracedSpan]) -> list[tuple[str, str, float, float]]:
    return [(span.name, span.track, round(span.begin_s, 6), round(span.begin_s + span.seconds, 6)) for span in spans]


def test_parts_follow_one_another_in_the_middle_of_the_time_until_the_answer() -> None:
    spans = list(work(StoreTimes(search_s=0.25, read_s=0.5, send_wait_s=0.25)).spans("look-ups"))
    assert placed(spans) == [
        ("search", "look-ups", 10.5, 10.75),
        ("read from the disk", "look-ups", 10.75, 11.25),
        ("wait to be sent", "waits", 11.25, 11.5),
    ]
    assert {span.service for span in spans} == {"s"}


def test_what_came_piece_by_piece_was_being_sent_until_its_end() -> None:
    spans = list(work(StoreTimes(wait_s=2.0), sent_s=15.5).spans("LoRA ink"))
    assert placed(spans) == [("wait for its turn", "waits", 10.0, 12.0), ("send", "LoRA ink", 12.0, 15.5)]


def test_every_part_of_the_contract_has_a_name() -> None:
    spans = list(work(StoreTimes(**dict.fromkeys(PARTS, 0.1))).spans("look-ups"))
    assert len({span.name for span in spans}) == len(PARTS)


@given(parts=st.dictionaries(st.sampled_from(PARTS), SECONDS), seen_s=st.floats(-1.0, 1e6))
def test_whatever_a_store_says_stands_within_what_was_seen(parts: dict[str, float], seen_s: float) -> None:
    spans = list(work(StoreTimes(**parts), answered_s=10.0 + seen_s).spans("look-ups"))
    end_s = 10.0 + max(0.0, seen_s)
    assert all(span.seconds >= 0.0 for span in spans)
    assert all(10.0 - 1e-6 <= span.begin_s <= span.begin_s + span.seconds <= end_s + 1e-6 for span in spans)
    for one, next_one in pairwise(spans):
        assert one.begin_s + one.seconds == pytest.approx(next_one.begin_s)


def test_nothing_said_is_nothing_drawn() -> None:
    assert not list(work(StoreTimes()).spans("look-ups"))
