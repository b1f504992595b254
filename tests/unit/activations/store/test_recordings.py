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


def test_a_template_is_for_who_comes_first_with_a_question_or_a_section() -> None:
    table = _Table()
    assert table.pending.grant("key", "a")
    assert not table.pending.grant("key", "b")
    assert table.pending.begin_section("key", "rb", "b") is None
    assert table.pending.begin_section("other", "rb", "b") is not None
    assert not table.pending.grant("other", "a")
    assert len(table.pending) == 2


def test_what_was_sent_whole_is_nobodys_to_end() -> None:
    table = _Table()
    begun = table.pending.begin_section("key", "ra", "a")
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
        table.pending.begin_section(key, recording, "a")
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
        table.pending.begin_section(key, f"r {key}", link)
    table.pending.end_link("a")
    assert table.over == ["r one", "r three"]
    assert [each.recording for each in table.pending.end_all()] == ["r two"]
    assert len(table.pending) == 0
