"""Processes killed or stopped at the other end of a link: what is half there stays half, calls end, nothing leaks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bottega.errors import DeadlineExceeded, LinkError, NoCredit, PeerDead
from bottega.transport import Backend, Link, LinkListener
from tests.support.link_peer import FILE_BYTES, LIMITS, Peers, end, peers
from tests.support.transport_backends import (
    BACKENDS,
    LAYOUT,
    check_message,
    content,
    descriptor_targets,
    devices_for,
    listening,
    mapped_files,
    patience,
    read,
    sealed_file,
    soon,
    write,
)
from tests.support.waiting import wait_until

AT_ONCE_S = 2.0

pytestmark = pytest.mark.parametrize("way", BACKENDS, ids=str)


@pytest.fixture(scope="module")
def others() -> Iterator[Peers]:
    with peers(devices=True) as started:
        yield started


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[LinkListener]:
    with listening(tmp_path, limits=LIMITS, devices=devices_for(*BACKENDS)) as opened:
        yield opened


def _met(others: Peers, listener: LinkListener, role: str, way: Backend) -> tuple[Link, int]:
    offer = listener.offer()
    pid = others.start(role, offer, way)
    return listener.accept(offer, patience()), pid


def test_a_sender_killed_in_mid_message_never_gives_a_whole_one(
    others: Peers, listener: LinkListener, way: Backend
) -> None:
    link, pid = _met(others, listener, "send_half", way)
    with link:
        incoming = link.recv(patience(), LAYOUT)
        incoming.wait(2, patience())
        end(pid)
        with pytest.raises(PeerDead):
            incoming.wait(3, patience())
        assert bytes(incoming.view(1)) == content(LAYOUT, 1)[1], "what had arrived can still be read"
        for index in (2, 3):
            with pytest.raises(IndexError):
                incoming.view(index)
        for call in (lambda: link.recv(patience()), lambda: link.start_message(LAYOUT, patience())):
            with pytest.raises(PeerDead):
                call()
        assert link.counters.snapshot().received.messages == 0
        assert link.counters.snapshot().deaths == {"PeerDead": 1}


def test_a_killed_receiver_wakes_the_sender_that_waits_for_its_credit(
    others: Peers, listener: LinkListener, way: Backend
) -> None:
    link, pid = _met(others, listener, "hold", way)
    with link:
        for seed in range(2):
            write(link, LAYOUT, content(LAYOUT, seed))
        read(link, LAYOUT)
        end(pid)
        with pytest.raises(PeerDead):
            link.start_message(LAYOUT, patience())


def test_a_sender_learns_of_a_death_at_its_next_call(others: Peers, listener: LinkListener, way: Backend) -> None:
    link, pid = _met(others, listener, "idle", way)
    with link:
        end(pid)
        _wait_until_gone(pid)
        with pytest.raises(PeerDead):
            link.start_message(LAYOUT, patience())


def test_a_stopped_peer_costs_the_deadline_and_can_go_on(others: Peers, listener: LinkListener, way: Backend) -> None:
    link, pid = _met(others, listener, "echo", way)
    with link:
        check_message(link, link)
        os.kill(pid, signal.SIGSTOP)
        write(link, LAYOUT, content(LAYOUT, 2))
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            link.recv(soon())
        assert time.monotonic() - began < AT_ONCE_S
        os.kill(pid, signal.SIGCONT)
        assert read(link, LAYOUT) == content(LAYOUT, 2)
        os.kill(pid, signal.SIGSTOP)
        for _ in range(LIMITS.slots):
            link.send(LAYOUT, content(LAYOUT, 3), patience())
        began = time.monotonic()
        with pytest.raises(NoCredit):
            link.send(LAYOUT, content(LAYOUT, 3), soon())
        assert time.monotonic() - began < AT_ONCE_S
        end(pid)


def test_a_receiver_cannot_change_what_it_is_sent(others: Peers, listener: LinkListener, way: Backend) -> None:
    link, pid = _met(others, listener, "scribble", way)
    with link:
        write(link, LAYOUT, content(LAYOUT, 1))
        if way == Backend.MEMFD:  # the same pages: the system stops who writes them
            with pytest.raises(PeerDead):
                link.recv(patience())
        else:
            assert read(link, LAYOUT) == content(LAYOUT, 2)
            end(pid)


def _in_mid_message(link: Link, pid: int) -> None:
    incoming = link.recv(patience())
    incoming.wait(1, patience())
    end(pid)
    incoming.wait_all(patience())


def _while_it_holds_a_message(link: Link, pid: int) -> None:
    link.prepare(LAYOUT, patience())
    write(link, LAYOUT, content(LAYOUT, 1))
    read(link, LAYOUT)
    end(pid)
    link.recv(patience())


def _while_it_sends(link: Link, pid: int) -> None:
    for number in range(1_000_000):
        if number == 3:
            end(pid)
        read(link, LAYOUT)


def _while_it_passes_files(link: Link, pid: int) -> None:
    for number in range(1_000_000):
        if number == 3:
            end(pid)
        with link.recv(patience()) as incoming:
            incoming.wait_all(patience())
            assert incoming.file is not None
            assert len(incoming.file) == FILE_BYTES


def _while_files_wait_for_it(link: Link, pid: int) -> None:
    with sealed_file(bytes(FILE_BYTES)) as file:
        for seed in range(LIMITS.slots):
            link.send(LAYOUT, content(LAYOUT, seed), patience(), file=file)
    end(pid)
    link.recv(patience())


ROLES = (("send_half", _in_mid_message), ("hold", _while_it_holds_a_message), ("send_always", _while_it_sends))
FILE_ROLES = (("pass_files", _while_it_passes_files), ("idle", _while_files_wait_for_it))


def _meet_death(others: Peers, listener: LinkListener, way: Backend, number: int) -> int:
    """One kill, and what is heard of it; in which role hangs on the number. Returns the process id."""
    roles = ROLES + FILE_ROLES if way is Backend.MEMFD else ROLES
    role, meet_death = roles[number % len(roles)]
    link, pid = _met(others, listener, role, way)
    with link:
        with pytest.raises(LinkError):
            meet_death(link, pid)
        assert type(link.cause) is PeerDead
    _wait_until_gone(pid)
    return pid


def _resident_mib() -> float:
    return float(psutil.Process().memory_info().rss / 2**20)


def _wait_until_gone(pid: int) -> None:
    wait_until(lambda: not psutil.pid_exists(pid), "the killed process to be gone")


@pytest.mark.parametrize("kills", [10, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
def test_many_kills_leave_nothing_behind(others: Peers, listener: LinkListener, way: Backend, kills: int) -> None:
    warmed_up = [_meet_death(others, listener, way, number) for number in range(10)]
    resident_mib, descriptors = _resident_mib(), descriptor_targets()
    gone = [_meet_death(others, listener, way, number) for number in range(kills)]
    assert len({*warmed_up, *gone}) == 10 + kills
    # A thread may be about to close its last one.
    wait_until(lambda: not descriptor_targets() - descriptors, "all descriptors to be closed")
    assert mapped_files() == 0
    assert _resident_mib() - resident_mib < 4, "a link's slots are 1 MiB"
