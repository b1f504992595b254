"""Memory over disk, files that are used together: which group goes first, and what of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bottega.caching import Tier
from tests.support.tiered_files import FILE, WAIT_S, Shelf


class _Groups:
    """A shelf whose files are used in groups. spared: those that go last."""

    def __init__(self, folder: Path, *, room: int) -> None:
        self.spared: set[str] = set()
        self.shelf = Shelf(folder, room=room, spared=lambda: self.spared)
        self.names = itertools.count()

    def put(self, count: int) -> list[str]:
        return [self.shelf.put(next(self.names)) for _ in range(count)]

    def use(self, group: str, digests: Sequence[str]) -> list[Tier]:
        """All of a group, in order; where each was."""
        tiers = []
        for digest in digests:
            lease = self.shelf.tiers.borrow(digest, replace(FILE, group=group)).result(WAIT_S)
            tiers.append(lease.tier)
            self.shelf.tiers.give_back(lease)
        return tiers

    def there(self, digests: Sequence[str]) -> list[bool]:
        return [self.shelf.tiers.state(digest) is True for digest in digests]


def test_the_group_used_longest_ago_goes_first_and_of_it_what_its_next_use_needs_last(tmp_path: Path) -> None:
    groups = _Groups(tmp_path, room=6)
    a, b, c = groups.put(3), groups.put(3), groups.put(2)
    groups.use("a", a)
    groups.use("b", b)
    groups.use("a", a[:1])
    groups.use("c", c)
    assert groups.there(a) == [True] * 3, "all of it was used with its first"
    assert groups.there(b) == [True, False, False]
    assert groups.there(c) == [True, True]
    groups.shelf.tiers.close()


def test_two_groups_that_take_turns_and_do_not_fit_leave_each_other_a_part(tmp_path: Path) -> None:
    groups = _Groups(tmp_path, room=4)
    a, b = groups.put(3), groups.put(3)
    for _ in range(3):
        first = groups.use("a", a)
        groups.use("b", b)
    assert first == [Tier.MEMORY, Tier.LOADED, Tier.LOADED]
    groups.shelf.tiers.close()


def test_a_spared_group_goes_after_all_others_and_goes_all_the_same_where_there_is_no_other(tmp_path: Path) -> None:
    groups = _Groups(tmp_path, room=4)
    a, b, c = groups.put(2), groups.put(2), groups.put(3)
    groups.spared.add("a")
    groups.use("a", a)
    groups.use("b", b)
    groups.use("c", c[:2])
    assert (groups.there(a), groups.there(b), groups.there(c[:2])) == ([True] * 2, [False] * 2, [True] * 2)
    groups.use("a2", groups.put(2))
    assert groups.there(a) == [True, True]
    groups.spared.update({"a2"})
    assert groups.use("c", c[2:3]) == [Tier.LOADED], "it is not kept out"
    assert groups.there(a) == [True, False], "it was used longest ago"
    groups.shelf.tiers.close()
