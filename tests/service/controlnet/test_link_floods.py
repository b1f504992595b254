"""Offers of links that nobody takes up, by the hundred: a real ControlNet server goes on serving those who do."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
import pytest

from bottega.errors import LinksFull
from bottega.miniature import WEIGHTS
from bottega.rpc.status import from_rpc_error
from bottega.transport import Deadline, connect, offer_from_wire
from tests.samples.controlnets import control_image
from tests.support.running_controlnets import ControlNetServer, House, Worker, controlled, hosts
from tests.support.services import Services
from tests.support.waiting import wait_until

PER_S = 40
# Beyond the time that an offer may be taken up, so that there are as many as there ever will be.
FLOOD_S = 12.0
SPEC = controlled(("edges", control_image(1), 0.8), num_inference_steps=4)


@dataclass(slots=True, kw_only=True, eq=False)
class Cast:
    """early, late: workers that have no link yet."""

    server: ControlNetServer
    early: Worker
    late: Worker


@pytest.fixture(scope="module")
def cast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cast]:
    folder = tmp_path_factory.mktemp("flooded")
    with Services(folder) as services, ThreadPoolExecutor(3) as pool:
        house = House(services, folder, {"edges": WEIGHTS / "controlnets" / "edges"})
        server = pool.submit(house.server, "flooded")
        early, late = pool.submit(house.worker, "early"), pool.submit(house.worker, "late")
        yield Cast(server=server.result(), early=early.result(), late=late.result())


@dataclass(slots=True, kw_only=True, eq=False)
class Flood:
    """answers: how many calls were answered with each status."""

    answers: Counter[str] = field(default_factory=Counter)


@contextmanager
def flood(server: ControlNetServer) -> Iterator[Flood]:
    """Asks for offers at a steady rate, until the block ends."""
    told, stopped = Flood(), threading.Event()

    def ask() -> None:
        due = time.monotonic()
        while not stopped.is_set():
            told.answers[_answer(server)] += 1
            due += 1 / PER_S
            time.sleep(max(0.0, due - time.monotonic()))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    try:
        yield told
    finally:
        stopped.set()
        asking.join(10)


def _answer(server: ControlNetServer) -> str:
    try:
        server.open_link("rogue")
    except grpc.RpcError as error:
        typed = from_rpc_error(error)
        assert isinstance(typed, LinksFull), typed
        assert typed.retry_after_s
        return str(error.code().name)
    return "OK"


def _link(server: ControlNetServer) -> None:
    """Opens a link as a worker does, and ends it."""
    offer = offer_from_wire(server.open_link("another worker").offer)
    connect(offer, Deadline.after(5)).close()


def test_workers_link_and_draw_while_a_rogue_client_asks_for_links_that_it_does_not_take_up(cast: Cast) -> None:
    with flood(cast.server) as told:
        assert cast.early.draw(SPEC, hosts(SPEC, cast.server)).servers() == ["flooded"]
        began = time.monotonic()
        linked = 0
        while time.monotonic() - began < FLOOD_S:
            _link(cast.server)
            linked += 1
            time.sleep(0.2)
        assert cast.late.draw(SPEC, hosts(SPEC, cast.server)).servers() == ["flooded"]
        assert cast.early.draw(SPEC, hosts(SPEC, cast.server)).servers() == ["flooded"]
    assert linked > FLOOD_S
    assert told.answers.total() > FLOOD_S * PER_S / 2, "the machine was too slow for this to be a flood"


def test_call_limits_that_nobody_took_are_free_again_and_the_log_is_short(cast: Cast) -> None:
    lines = [event["event"] for event in cast.server.service.events()]
    told, more = "an offer of a link was not taken up", "more offers of links were not taken up"
    wait_until(lambda: _not_taken_up(cast.server, told, more) > FLOOD_S * PER_S / 2, "the offers to be given up")
    assert lines.count(told) < FLOOD_S * PER_S / 2
    assert more in lines


def _not_taken_up(server: ControlNetServer, told: str, more: str) -> int:
    """Offers, as the log counts them."""
    events = server.service.events()
    one_by_one = [event for event in events if event["event"] == told]
    return len(one_by_one) + sum(int(event["offers"]) for event in events if event["event"] == more)


def test_a_full_server_says_when_to_ask_again_and_a_workers_job_waits_for_it(cast: Cast) -> None:
    cast.server.kill_engine()  # its links end, and both workers need new ones
    wait_until(lambda: cast.server.engines == 2 and cast.server.serves(), "another engine to serve")
    with ThreadPoolExecutor(9) as pool:
        crowd = [pool.submit(_answer, cast.server) for _ in range(600)]
        wait_until(lambda: _refused(crowd), "a refusal")
        drawn = pool.submit(cast.late.draw, SPEC, hosts(SPEC, cast.server))
        assert {answer.result(60) for answer in crowd} == {"OK", "UNAVAILABLE"}
        assert drawn.result(60).servers() == ["flooded"]


def _refused(crowd: Sequence[Future[str]]) -> bool:
    return any(answer.done() and answer.result() == "UNAVAILABLE" for answer in crowd)
