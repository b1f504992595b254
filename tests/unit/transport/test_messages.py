"""Rates of links, and pieces that are as long as a link carries in a moment."""

from __future__ import annotations

import pytest

from bottega.transport import PieceSize, RateLimiter

MIB = 1 << 20


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which the test turns."""
    clock = [100.0]
    monkeypatch.setattr("bottega.transport.messages.time.monotonic", lambda: clock[0])
    return clock


def test_a_rate_is_kept_over_pieces_and_pauses(now: list[float]) -> None:
    pace = RateLimiter(MIB, max_bytes=4 * MIB)
    assert pace.wait_s == 0
    pace.spend(MIB // 2)
    pace.spend(MIB // 2)
    assert pace.wait_s == pytest.approx(1.0)
    now[0] += 5
    pace.spend(MIB // 4)
    assert pace.wait_s == pytest.approx(0.25), "what was not used before is not saved up"
    assert pace.max_bytes == MIB // 100


def test_without_a_rate_nothing_waits(now: list[float]) -> None:
    pace = RateLimiter(0, max_bytes=MIB)
    pace.spend(100 * MIB)
    assert (pace.wait_s, pace.max_bytes) == (0, MIB)
    assert RateLimiter(1 << 40, max_bytes=MIB).max_bytes == MIB


def _sizes(now: list[float], piece_s: float, count: int) -> list[int]:
    pieces = PieceSize(slots=2, max_bytes=MIB)
    found = []
    for _ in range(count):
        found.append(pieces.next())
        now[0] += piece_s
    return found


def test_pieces_grow_on_a_quick_link_to_their_most(now: list[float]) -> None:
    sizes = _sizes(now, 0.0001, 40)
    assert sizes[:4] == [64 << 10] * 3 + [128 << 10], "measured over as many pieces as cannot all be under way"
    assert (sizes == sorted(sizes), sizes[-1]) == (True, MIB)


def test_pieces_shrink_on_a_slow_link(now: list[float]) -> None:
    sizes = _sizes(now, 0.5, 40)
    assert (sizes == sorted(sizes, reverse=True), sizes[-1]) == (True, 4 << 10)


def test_pieces_stay_as_they_are_where_they_take_a_moment(now: list[float]) -> None:
    assert set(_sizes(now, 0.01, 20)) == {64 << 10}
