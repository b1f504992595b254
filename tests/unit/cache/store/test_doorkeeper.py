"""Which keys are let in."""

from __future__ import annotations

from bottega.cache.store.store import Doorkeeper


def _key(number: int) -> str:
    return f"{number:064x}"


def test_a_key_is_let_in_from_the_second_time_on() -> None:
    doorkeeper = Doorkeeper()
    assert [doorkeeper.admits(_key(number), "") for number in (1, 2, 1, 1, 2)] == [False, False, True, True, True]


def test_the_key_that_was_asked_about_longest_ago_is_forgotten() -> None:
    doorkeeper = Doorkeeper(most_keys=2)
    for number in (1, 2, 1, 3):
        doorkeeper.admits(_key(number), "")
    assert [doorkeeper.admits(_key(number), "") for number in (1, 2)] == [True, False]


def test_a_job_that_asks_again_is_no_second_request() -> None:
    doorkeeper = Doorkeeper()
    asked = [doorkeeper.admits(_key(1), job) for job in ("one", "one", "one", "two", "one", "two")]
    assert asked == [False, False, False, True, True, True]
