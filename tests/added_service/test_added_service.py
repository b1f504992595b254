"""A service that is no part of Bottega, from `bottega up` to an answer over a link."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from bottega.client import Client
from bottega.client.instance import StateFolder
from bottega.errors import BottegaError
from bottega.manifest import VARIABLE
from bottega.transport import (
    Connection,
    Incoming,
    LinkClient,
    LinkClientHandler,
    LinkClientSettings,
    LinkCounters,
    ServiceOffer,
    number_message,
    offer_from_wire,
    read_number,
)
from bottega.v1 import link_pb2, link_pb2_grpc
from bottega.v1.fleet_pb2 import Member
from bottega.v1.hosted_pb2 import HOSTED_STATE_LOADED
from tests.added_service.calls import ASK, COLOURS
from tests.added_service.service_spec import KIND
from tests.support.waiting import wait_until

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MANIFEST = HERE / "services.txt"
BOTTEGA = [sys.executable, "-m", "bottega.client.cli"]
START_S = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A `bottega up` with the store of colours, and how its commands find it."""

    process: subprocess.Popen[bytes]
    environment: dict[str, str]
    printed: Path
    client: Client

    def bottega(self, *arguments: str) -> str:
        """What a command prints."""
        done = subprocess.run(
            [*BOTTEGA, *arguments], capture_output=True, text=True, timeout=60, check=False, env=self.environment
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def store(self) -> Member:
        """The store of colours, as the gateway knows it."""
        (member,) = (member for member in self.client.fleet().members if member.registration.kind == KIND)
        return member


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    folder = tmp_path_factory.mktemp("up")
    state = StateFolder(folder / "state")
    environment = {
        **os.environ,
        VARIABLE: str(MANIFEST),
        "PYTHONPATH": str(ROOT),  # a user would have installed it
        "BOTTEGA_STATE": str(state.root),
    }
    printed = folder / "printed"
    options = ["--port", "0", "--threads", "1", "--device", "cpu", "--controlnet-servers", "0"]
    with printed.open("wb") as output:
        process = subprocess.Popen(
            [*BOTTEGA, "up", *options], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        )
    try:
        started = lambda: "Ready after" in printed.read_text() or process.poll() is not None  # noqa: E731
        wait_until(started, "the suite to be ready", within_s=START_S)
        record = state.read()
        assert record is not None, printed.read_text()
        with Client(record.address, fleet_address=record.fleet_address) as client:
            yield Suite(process=process, environment=environment, printed=printed, client=client)
    finally:
        process.terminate()
        process.wait(30)


def test_it_starts_with_the_suite_and_joins(suite: Suite) -> None:
    assert "1 store of colours" in suite.printed.read_text()
    assert f"{KIND:<12} serves at" in suite.printed.read_text()
    listed = suite.bottega("fleet", "--once")
    assert KIND in listed
    assert "blue (not loaded)" in listed
    assert "joined the fleet" in suite.bottega("logs", KIND)
    assert "1 store of colours joined" in suite.bottega("doctor")


def test_what_a_job_names_is_loaded_before_it_runs(suite: Suite) -> None:
    suite.client.generate("a red star", num_inference_steps=2, seed=1)

    def loaded() -> set[str]:
        return {item.name for item in suite.store().load.hosted if item.state == HOSTED_STATE_LOADED}

    wait_until(lambda: loaded() == {"red"}, "what the job named", within_s=10.0)


class _Answers(LinkClientHandler):
    """Asks for nothing by itself, and keeps what is answered."""

    def __init__(self) -> None:
        self.answers: queue.Queue[int] = queue.Queue()

    @property
    def wants_link(self) -> bool:
        return True

    def on_message(self, connection: Connection, incoming: Incoming) -> None:
        with incoming:
            self.answers.put(read_number(incoming.layout, connection.wait_all(incoming)))

    def on_end(self, cause: BottegaError) -> None:
        """The test ends it."""


def test_it_answers_over_a_link(suite: Suite) -> None:
    def offered(link_id: str) -> Future[ServiceOffer]:
        with grpc.insecure_channel(suite.store().registration.address) as channel:
            request = link_pb2.OpenLinkRequest(kind=KIND, worker="w", link_id=link_id)
            opened = link_pb2_grpc.LinkServiceStub(channel).OpenLink(request, timeout=10)
        found: Future[ServiceOffer] = Future()
        found.set_result(ServiceOffer(offer=offer_from_wire(opened.offer), service=opened.service))
        return found

    handler = _Answers()
    client = LinkClient(
        handler, peer="the store of colours", request=offered, settings=LinkClientSettings(), counters=LinkCounters()
    )
    client.connection.send(number_message(ASK, list(COLOURS).index("green")))
    client.start()
    try:
        assert handler.answers.get(timeout=10) == COLOURS["green"]
    finally:
        client.close()
        client.join()


def test_nothing_but_its_package_and_a_manifest_knows_it() -> None:
    known = [
        path
        for top in ("deploy", "libs", "protos", "services")
        for path in (ROOT / top).rglob("*")
        if path.suffix in {".py", ".proto", ".txt", ".yaml", ".service", ".template"} and "egg-info" not in str(path)
        if "added_service" in (text := path.read_text(encoding="utf-8")) or f'"{KIND}"' in text
    ]
    assert known == []
    assert MANIFEST.read_text() == "tests.added_service.service_spec\n", "one line"
