"""Memory over disk: what is used stays within the budget, what is pinned or being sent is not let go, loads are one."""

from __future__ import annotations

import hashlib
import itertools
import os
import resource
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bottega.caching.tiers import Tier
from bottega.errors import BottegaError, DataLoss, LoraNotFound, StorageUnavailable, TooManyOpenFiles
from bottega.transport.memory import new_file, received_file, seal
from tests.support.tiered_files import FILE, SIZE, WAIT_S, Shelf
from tests.support.waiting import wait_until

# Of a load that is slow; long beside what a thread may have to wait for the processor.
_LOAD_S = 0.2


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    made = Shelf(tmp_path)
    yield made
    made.gate.set()
    made.tiers.close()


def test_what_was_used_is_in_memory_until_others_need_the_room(shelf: Shelf) -> None:
    a, b, c = (shelf.put(number) for number in range(3))
    assert [shelf.use(digest) for digest in (a, b, a)] == [Tier.LOADED, Tier.LOADED, Tier.MEMORY]
    assert shelf.use(c) is Tier.LOADED
    assert shelf.tiers.state(b) is None, "the one used longest ago goes"
    assert shelf.use(a) is Tier.MEMORY
    assert shelf.tiers.used_bytes == 2 * SIZE
    assert shelf.tiers.counts.evictions == 1


def test_what_is_being_sent_is_not_let_go_and_others_come_from_the_disk(shelf: Shelf) -> None:
    a, b, c = (shelf.put(number) for number in range(3))
    with shelf.leased(a, b):
        assert shelf.use(c) is Tier.DISK
        assert shelf.tiers.used_bytes == 2 * SIZE
    assert shelf.use(c) is Tier.LOADED


def test_a_lease_says_what_its_own_load_took_and_what_another_ones_had_it_wait(shelf: Shelf) -> None:
    digest, begun = shelf.put(1), threading.Event()

    def load_slowly() -> None:
        begun.set()
        shelf.gate.wait(WAIT_S)

    shelf.before_load = load_slowly
    shelf.gate.clear()
    asked_s = time.monotonic()
    borrowed = [shelf.tiers.borrow(digest)]
    assert begun.wait(WAIT_S)
    borrowed.append(shelf.tiers.borrow(digest))
    time.sleep(_LOAD_S)
    shelf.gate.set()
    own, joined = (each.result(WAIT_S) for each in borrowed)
    seen_s = time.monotonic() - asked_s
    asked_again_s = time.monotonic()
    there = shelf.lease(digest)
    assert there.times.wait_s <= time.monotonic() - asked_again_s
    assert own.times.check_s > 0.0
    assert own.times.read_s >= _LOAD_S
    assert own.times.wait_s + own.times.read_s + own.times.check_s <= seen_s
    assert _LOAD_S <= joined.times.wait_s <= seen_s
    for waited in (joined, there):
        assert not waited.times.read_s + waited.times.check_s


def test_what_is_pinned_stays(shelf: Shelf) -> None:
    a, b, c = (shelf.put(number) for number in range(3))
    shelf.tiers.pin([a])
    for digest in (a, b, c, b, c):
        shelf.use(digest)
    assert shelf.tiers.state(a) is True


def test_what_is_pinned_without_room_is_loaded_when_what_was_lent_comes_back(shelf: Shelf) -> None:
    a, b, c = (shelf.put(number) for number in range(3))
    leases = [shelf.lease(a), shelf.lease(b)]
    shelf.tiers.pin([c])
    assert shelf.tiers.state(c) is None
    shelf.tiers.give_back(leases[0])
    wait_until(lambda: shelf.tiers.state(c) is True, "the load")
    assert shelf.tiers.state(a) is None
    assert shelf.use(c) is Tier.MEMORY, "it was loaded for nobody's fetch"
    shelf.tiers.give_back(leases[1])


@pytest.mark.parametrize("damaged", [False, True], ids=["whole", "damaged"])
def test_what_is_pinned_without_room_is_loaded_when_what_was_on_its_way_may_go(tmp_path: Path, damaged: bool) -> None:
    shelf = Shelf(tmp_path, room=1)
    a, b = (shelf.put(number) for number in range(2))
    if damaged:
        (shelf.folder / a).write_bytes(b"x" * SIZE)
    shelf.gate.clear()
    assert shelf.tiers.prefetch(a)
    shelf.tiers.pin([b])
    assert (shelf.tiers.state(a), shelf.tiers.state(b)) == (False, None)
    shelf.gate.set()
    wait_until(lambda: shelf.tiers.state(b) is True, "the load")
    assert shelf.tiers.state(a) is None
    shelf.tiers.close()


@pytest.mark.parametrize("size", [None, 3 * SIZE], ids=["gone", "too large"])
def test_one_that_cannot_be_loaded_does_not_use_up_the_only_occasion_of_the_next(
    shelf: Shelf, size: int | None
) -> None:
    a, b, c = (shelf.put(number) for number in range(3))
    if size is None:
        (shelf.folder / c).unlink()
    else:
        (shelf.folder / c).write_bytes(bytes(size))
    leases = [shelf.lease(a), shelf.lease(shelf.put(3))]
    shelf.tiers.pin([c, b])
    shelf.tiers.give_back(leases[0])
    wait_until(lambda: shelf.tiers.state(b) is True, "the load")
    assert shelf.tiers.state(c) is None
    shelf.tiers.give_back(leases[1])


def test_what_is_pinned_and_damaged_is_said_to_be_and_read_once(shelf: Shelf, caplog: pytest.LogCaptureFixture) -> None:
    a, b = (shelf.put(number) for number in range(2))
    (shelf.folder / a).write_bytes(b"x" * SIZE)
    shelf.tiers.pin([a])
    wait_until(lambda: shelf.tiers.counts.failures == 1, "the failure")
    assert [shelf.use(b) for _ in range(3)] == [Tier.LOADED, Tier.MEMORY, Tier.MEMORY]
    assert shelf.opened.count(a) == 1
    (line,) = caplog.records
    assert (line.levelname, vars(line)["digest"]) == ("ERROR", a)
    assert "damaged" in vars(line)["why"]


def test_nobody_can_change_what_is_in_memory(shelf: Shelf) -> None:
    lease = shelf.lease(shelf.put(1))
    assert lease.resident
    for change in (
        lambda: os.pwrite(lease.descriptor, b"x", 0),
        lambda: os.ftruncate(lease.descriptor, 10),
        lambda: os.ftruncate(lease.descriptor, 2 * SIZE),
    ):
        with pytest.raises(PermissionError):
            change()
    assert received_file(lease.descriptor, SIZE) == bytes([1]) * SIZE, "as a worker takes it in"
    shelf.tiers.give_back(lease)


def test_one_load_serves_all_who_ask_meanwhile(shelf: Shelf) -> None:
    a = shelf.put(0)
    shelf.gate.clear()
    assert shelf.tiers.prefetch(a)
    asked = [shelf.tiers.borrow(a) for _ in range(5)]
    shelf.gate.set()
    leases = [each.result(WAIT_S) for each in asked]
    assert shelf.opened == [a]
    assert {lease.tier for lease in leases} == {Tier.LOADED}, "none of them has found it in memory"
    assert len({lease.descriptor for lease in leases}) == 1
    assert shelf.tiers.leases(a) == 5
    for lease in leases:
        shelf.tiers.give_back(lease)
    assert shelf.tiers.leases(a) == 0
    assert shelf.tiers.wait_idle(0.0)


def test_what_was_loaded_ahead_counts_as_loaded_for_the_first_who_asks_and_as_in_memory_for_the_next(
    shelf: Shelf,
) -> None:
    a = shelf.put(0)
    assert shelf.tiers.prefetch(a)
    wait_until(lambda: shelf.tiers.state(a) is True, "the load")
    assert shelf.tiers.prefetch(a)
    assert [shelf.use(a) for _ in range(3)] == [Tier.LOADED, Tier.MEMORY, Tier.MEMORY]
    assert shelf.tiers.counts.by_tier == {Tier.LOADED: 1, Tier.MEMORY: 2}
    assert shelf.tiers.counts.loads == 1


def test_different_loras_load_at_the_same_time(shelf: Shelf) -> None:
    shelf.before_load = threading.Barrier(2, timeout=WAIT_S).wait
    asked = [shelf.tiers.borrow(shelf.put(number)) for number in range(2)]
    for each in asked:
        shelf.tiers.give_back(each.result(2 * WAIT_S))
    assert shelf.tiers.counts.loads == 2


def test_a_damaged_file_and_one_that_is_gone_are_told_apart_and_hold_no_room(shelf: Shelf) -> None:
    a = shelf.put(0)
    (shelf.folder / a).write_bytes(b"x" * SIZE)
    with pytest.raises(DataLoss):
        shelf.lease(a)
    with pytest.raises(LoraNotFound):
        shelf.lease("0" * 64)
    assert shelf.tiers.used_bytes == 0
    assert shelf.tiers.leases(a) == 0
    assert shelf.tiers.counts.failures == 1


def test_what_was_lent_is_readable_though_its_file_is_removed(shelf: Shelf) -> None:
    a, b, c = (shelf.put(number) for number in range(3))
    leases = [shelf.lease(digest) for digest in (a, b, c)]
    assert leases[2].tier is Tier.DISK
    for digest, lease in zip((a, b, c), leases, strict=True):
        shelf.tiers.forget(digest)
        (shelf.folder / digest).unlink()
        assert hashlib.sha256(os.pread(lease.descriptor, SIZE, 0)).hexdigest() == digest
        shelf.tiers.give_back(lease)


@pytest.mark.parametrize(
    ("limit", "most", "kind", "says"),
    [
        (resource.RLIMIT_NOFILE, 3, TooManyOpenFiles, "open files"),
        # Of files without a name, too.
        (resource.RLIMIT_FSIZE, SIZE - 1, StorageUnavailable, "no memory is left"),
    ],
    ids=["descriptors", "memory"],
)
def test_what_there_is_none_left_of_is_said_and_nothing_stays_lent(
    shelf: Shelf, limit: int, most: int, kind: type[BottegaError], says: str
) -> None:
    a = shelf.put(0)
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (most, hard))
    try:
        error = shelf.tiers.borrow(a).exception(WAIT_S)
    finally:
        resource.setrlimit(limit, (soft, hard))
    assert isinstance(error, kind)
    assert says in error.message
    assert (shelf.tiers.leases(a), shelf.tiers.used_bytes) == (0, 0)
    assert shelf.use(a) is Tier.LOADED


def test_files_that_are_checked_whenever_they_are_read_are_never_served_damaged(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, checks=True)
    a, b, c = (shelf.put(number) for number in range(3))
    assert shelf.use(a) is Tier.LOADED
    shelf.use(b), shelf.use(c)
    assert shelf.tiers.state(a) is None
    (shelf.folder / a).write_bytes(b"x" * SIZE)
    with pytest.raises(DataLoss, match="damaged"):
        shelf.lease(a)
    assert shelf.damaged == [a]
    with shelf.leased(b, c), pytest.raises(DataLoss, match="damaged"):
        shelf.lease(a)  # memory has no room for it
    assert shelf.damaged == [a, a]
    assert (shelf.tiers.leases(a), shelf.tiers.used_bytes) == (0, 2 * SIZE)
    (shelf.folder / a).write_bytes(bytes(SIZE))
    with shelf.leased(b, c):
        assert shelf.use(a) is Tier.DISK
    shelf.tiers.close()


def test_what_is_in_memory_already_is_taken_as_it_is(shelf: Shelf) -> None:
    a, b, c = (shelf.put(number) for number in range(3))

    def given(digest: str) -> int:
        descriptor = new_file("given")
        os.write(descriptor, (shelf.folder / digest).read_bytes())
        seal(descriptor)
        return descriptor

    assert shelf.tiers.adopt(a, given(a), FILE)
    assert shelf.use(a) is Tier.MEMORY
    assert shelf.tiers.counts.loads == 0
    assert not shelf.tiers.adopt(a, given(a), FILE), "it is there"
    shelf.use(b)
    assert shelf.tiers.adopt(c, given(c), FILE)
    assert shelf.tiers.state(a) is None, "the one used longest ago goes"
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names alone
    with shelf.leased(b, c):
        for _ in range(5):
            assert not shelf.tiers.adopt(a, given(a), FILE), "there is no room"
    assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208 - names alone


def test_what_is_forgotten_while_it_is_lent_or_on_its_way_leaves_memory_when_that_ends(shelf: Shelf) -> None:
    a, b = shelf.put(0), shelf.put(1)
    with shelf.leased(a):
        shelf.tiers.forget(a)
        assert shelf.tiers.used_bytes == SIZE
    assert shelf.tiers.used_bytes == 0
    shelf.gate.clear()
    assert shelf.tiers.prefetch(b)
    shelf.tiers.forget(b)
    shelf.gate.set()
    wait_until(lambda: shelf.tiers.used_bytes == 0, "what was on its way to be let go")


def test_a_disk_that_hangs_holds_up_nobody_who_asks_for_what_is_in_memory(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    a, b = shelf.put(0), shelf.put(1)
    shelf.use(a)
    shelf.hangs.clear()
    asking = threading.Thread(target=shelf.tiers.prefetch, args=(b,))
    asking.start()
    assert shelf.use(a) is Tier.MEMORY
    assert shelf.tiers.used_bytes == SIZE
    assert shelf.tiers.prefetch(b, FILE), "what is known is not looked at"
    assert asking.is_alive(), "nobody has waited for the disk"
    shelf.hangs.set()
    asking.join(WAIT_S)
    shelf.tiers.close()


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
