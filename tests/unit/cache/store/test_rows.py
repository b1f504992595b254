"""Which noise rests for a prompt, so that at most one picture of a row comes from what another one came from."""

from __future__ import annotations

from bottega.cache.store.selector import PromptRows
from tests.fakes.fake_time import FakeTime

KEY, PROMPT, OTHER = "ab" * 32, "01" * 32, "02" * 32


def test_noise_that_would_make_a_second_pair_rests() -> None:
    rows = PromptRows(4, FakeTime().monotonic)
    started = [rows.reserve(KEY, PROMPT, noise) for noise in (1, 1, 1, 2, 2, 3, 3)]
    assert started == [True, True, False, True, False, True, True]
    assert rows.resting(KEY, PROMPT) == {2, 3}
    assert all(rows.reserve(KEY, PROMPT, noise) for noise in (4, 5))
    assert rows.resting(KEY, PROMPT) == frozenset(), "the pair is not in the row any more"


def test_a_picture_that_is_noted_when_it_begins_and_when_it_is_recorded_counts_once() -> None:
    rows = PromptRows(6, FakeTime().monotonic)
    rows.note(KEY, PROMPT, 1)
    rows.note_once(KEY, PROMPT, 1)
    assert rows.resting(KEY, PROMPT) == frozenset()
    rows.note(KEY, "", 1)


def test_a_row_of_one_lets_any_entry_start_each_picture() -> None:
    rows = PromptRows(1, FakeTime().monotonic)
    assert all(rows.reserve(KEY, PROMPT, 1) for _ in range(3))


def test_nothing_rests_for_a_prompt_that_is_not_known() -> None:
    rows = PromptRows(6, FakeTime().monotonic)
    assert all(rows.reserve(KEY, "", 1) for _ in range(3))
    assert rows.resting(KEY, "") == frozenset()


def test_prompts_that_were_drawn_longest_ago_are_forgotten() -> None:
    rows = PromptRows(6, FakeTime().monotonic, most_prompts=2)
    for prompt in (PROMPT, OTHER, PROMPT, OTHER, PROMPT, "03" * 32):
        rows.note(KEY, prompt, 1)
    assert [bool(rows.resting(KEY, prompt)) for prompt in (PROMPT, OTHER, "03" * 32)] == [True, False, False]


def test_a_row_ends_when_nothing_of_its_prompt_was_drawn_for_five_minutes() -> None:
    time = FakeTime()
    rows = PromptRows(6, time.monotonic)
    for wait_s in (0.0, 280.0, 280.0):
        time.now += wait_s
        rows.note(KEY, PROMPT, 1)
    assert rows.resting(KEY, PROMPT) == {1}
    time.now += 301.0
    assert rows.resting(KEY, PROMPT) == frozenset()
    assert [rows.reserve(KEY, PROMPT, 1) for _ in range(3)] == [True, True, False]


def test_where_a_picture_takes_minutes_a_row_goes_on_for_the_time_of_six() -> None:
    time = FakeTime()
    rows = PromptRows(6, time.monotonic)
    rows.note(KEY, PROMPT, 1, 600.0)
    assert rows.reserve(KEY, PROMPT, 1, 600.0)
    rows.note_once(KEY, PROMPT, 2)  # what is recorded says nothing of the time, and ends nothing sooner
    time.now += 3_599.0
    assert not rows.reserve(KEY, PROMPT, 1, 600.0)
    time.now += 2.0
    assert rows.resting(KEY, PROMPT) == frozenset()
