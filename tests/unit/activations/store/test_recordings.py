"""Who records a template, and until when."""

from __future__ import annotations

from bottega.activations.store.recordings import PendingRecording, PendingRecordings


class _Table:
    def __init__(self) -> None:
        self.now = 0.0
        self.over: list[str] = []
        self.pending = PendingRecordings(idle_s=10.0, now=lambda: self.now, on_over=self._end)

    def _end(self, pending: PendingRecording) -> None:
        assert pending.over
        self.over.append(pending.recording)

    def begin(self, key: str, recording: str, link: str) -> PendingRecording | None:
        """A section of what the link may record."""
        self.pending.grant(key, link)
        return self.pending.begin_section(key, recording, link)


def test_a_template_is_for_who_asks_first() -> None:
    table = _Table()
    assert table.pending.grant("key", "a")
    assert not table.pending.grant("key", "b")
    assert table.pending.begin_section("key", "rb", "b") is None
    assert table.pending.begin_section("key", "ra", "a") is not None
    assert table.pending.begin_section("other", "rb", "b") is None, "it has not asked"
    assert table.pending.grant("other", "a")
    assert len(table.pending) == 2
    assert table.pending.grant("third", "a")
    assert not table.pending.grant("third", "b")
    table.pending.abandon("third", "", "a")
    assert table.pending.grant("third", "b"), "abandoned before its first section"


def test_sections_of_what_became_a_template_and_went_begin_nothing() -> None:
    table = _Table()
    begun = table.begin("key", "ra", "a")
    assert begun is not None
    table.pending.complete("key", "ra", "a")
    table.pending.remove(begun)
    assert table.pending.begin_section("key", "ra", "a") is None
    assert len(table.pending) == 0
    assert table.pending.grant("key", "b")


def test_a_slow_worker_may_go_on_with_what_nobody_else_has_begun_meanwhile() -> None:
    table = _Table()
    for key in ("one", "two", "three", "four"):
        table.begin(key, f"r {key}", "a")
    table.now = 11.0
    table.pending.expire()
    assert len(table.pending) == 0
    assert table.pending.begin_section("one", "r one", "a") is not None
    assert table.pending.begin_section("two", "r two", "b") is None, "it was not its own"
    assert table.pending.grant("two", "b")
    table.pending.end_link("b")
    assert table.pending.begin_section("two", "r two", "a") is None
    table.pending.abandon("three", "r three", "a")
    assert table.pending.begin_section("three", "r three", "a") is None
    table.pending.end_link("a")
    assert table.pending.begin_section("four", "r four", "a") is None
    assert len(table.pending) == 0


def test_what_was_sent_whole_is_told_from_what_may_not_be_recorded() -> None:
    table = _Table()
    table.begin("key", "ra", "a")
    assert not table.pending.is_being_written("key", "ra", "a")
    whole = table.pending.complete("key", "ra", "a")
    assert whole is not None
    assert table.pending.begin_section("key", "ra", "a") is None
    assert table.pending.is_being_written("key", "ra", "a")
    assert not table.pending.is_being_written("key", "ra", "b")
    assert not table.pending.is_being_written("key", "another", "a")
    table.pending.remove(whole)
    assert not table.pending.is_being_written("key", "ra", "a")


def test_what_is_remembered_of_workers_that_record_nothing_is_bounded() -> None:
    table = _Table()
    for number in range(1100):
        table.pending.grant(f"key {number}", "a")
        table.now += 11.0
        table.pending.expire()
    assert table.pending.begin_section("key 0", "ra", "a") is None, "forgotten: it asks again"
    assert table.pending.begin_section("key 1099", "ra", "a") is not None


def test_what_was_sent_whole_is_nobodys_to_end() -> None:
    table = _Table()
    begun = table.begin("key", "ra", "a")
    assert table.pending.complete("key", "rb", "a") is None
    assert table.pending.complete("key", "ra", "b") is None
    assert table.pending.complete("key", "ra", "a") is begun
    assert table.pending.complete("key", "ra", "a") is None, "once"
    table.now = 100.0
    table.pending.end_link("a")
    table.pending.abandon("key", "ra", "a")
    table.pending.expire()
    assert table.pending.begin_section("key", "ra", "a") is None
    assert not table.pending.grant("key", "b")
    assert table.over == []
    assert begun is not None
    table.pending.remove(begun)
    assert table.pending.grant("key", "b")
    table.pending.remove(begun)
    assert len(table.pending) == 1, "another's stays"


def test_one_of_which_nothing_comes_is_given_up_when_somebody_asks_or_time_goes_by() -> None:
    table = _Table()
    for key, recording in (("one", "r1"), ("two", "r2")):
        table.begin(key, recording, "a")
    table.now = 10.0
    table.pending.begin_section("two", "r2", "a")
    table.now = 11.0
    assert table.pending.grant("one", "b")
    assert table.over == ["r1"]
    table.pending.expire()
    assert table.over == ["r1"]
    table.now = 21.0
    table.pending.expire()
    assert table.over == ["r1", "r2"]


def test_a_link_that_ends_takes_its_own_with_it() -> None:
    table = _Table()
    for key, link in (("one", "a"), ("two", "b"), ("three", "a")):
        table.begin(key, f"r {key}", link)
    table.pending.end_link("a")
    assert table.over == ["r one", "r three"]
    assert [each.recording for each in table.pending.end_all()] == ["r two"]
    assert len(table.pending) == 0
