"""A real server beside callers who mean harm: others have their room, and connections that only hurt are ended."""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import socket
import termios
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from bottega.errors import Unauthenticated
from bottega.rpc import connection_limits, flood_defence, inbound_connections, source_filter
from bottega.rpc.address import Peer, peer_of
from bottega.rpc.channel import open_channel
from bottega.rpc.connection_limits import ConnectionGuard
from bottega.rpc.inbound_connections import InboundConnection, open_file_count
from bottega.rpc.interceptor import connection_ledger
from bottega.rpc.interceptor.connection_ledger import ConnectionLedger
from bottega.rpc.interceptor.memory_quota import MemoryQuota
from bottega.rpc.security.caller import Caller, Metadata, Role
from bottega.rpc.server import Server
from bottega.rpc.server_config import ServerConfig
from bottega.rpc.source_filter import open_sockets
from bottega.v1 import image_pb2, image_pb2_grpc
from tests.fakes.fake_time import FakeTime
from tests.fakes.scripted_images import ScriptedImages, scripted_images, stub
from tests.support.crowds import alive, connections
from tests.support.cut_cable import laid
from tests.support.flooders import MEANINGLESS, PREFACE, burst, flooding
from tests.support.waiting import eventually, wait_until

OTHER = "127.0.0.2"
# On busy cores, for a MiB of pings and two looks at it.
PINGED_S = 30.0
# Longer than it takes to notice a flood; it ends with its test.
FLOOD_S = 60.0
# TIME_WAIT and CLOSE, in Linux's <net/tcp_states.h>.
CLOSED = (6, 7)
SUBMIT = "/bottega.v1.ImageService/SubmitJob"
KEY = (("authorization", "Bearer btg"),)


async def _submit(channel: grpc.aio.Channel) -> None:
    """Bring a request which may be large; this server has no such method beyond that."""
    ask: Any = channel.unary_unary(SUBMIT)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(b"", timeout=30)
    assert caught.value.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL), caught.value.details()


async def test_streams_that_say_nothing_hold_up_neither_another_host_nor_small_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Who has to wait for them is refused.
    monkeypatch.setitem(MemoryQuota.__init__.__kwdefaults__, "contended_s", 600.0)  # type: ignore[arg-type]
    async with (
        scripted_images() as (server, _, channel),
        laid(server.address, source=OTHER) as cable,
        open_channel(cable.address) as beside,
    ):
        silent: Any = channel.stream_stream(SUBMIT)
        calls = [silent() for _ in range(10)]  # what five a second have open, for the two that each is waited for
        await asyncio.sleep(0.2)
        for _ in range(10):
            await _submit(beside)
        for each in (channel, beside):
            await stub(each).GetJob(image_pb2.GetJobRequest(), timeout=30)
        for call in calls:
            call.cancel()


@pytest.mark.parametrize("reads", [True, False], ids=["reads", "does not read"])
async def test_a_connection_that_does_nothing_but_ping_is_ended_and_others_stay(reads: bool) -> None:
    async with scripted_images() as (server, _, channel):
        host, _, port = server.address.rpartition(":")
        watch = stub(channel).WatchJob(image_pb2.WatchJobRequest(job_id="wait"))
        assert await watch.read() is not grpc.aio.EOF

        def ping() -> bool:
            """Whether the connection was ended, within what is ample."""
            with socket.create_connection((host, int(port)), timeout=5.0) as pinging:
                pinging.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                pinging.sendall(PREFACE)
                if reads:
                    threading.Thread(target=_read_out, args=[pinging], daemon=True).start()
                ends = time.monotonic() + PINGED_S
                try:
                    while time.monotonic() < ends:  # one by one: gRPC ends one that sends many at once
                        pinging.sendall(MEANINGLESS["pings"])
                except OSError:
                    return True
            return False

        assert await asyncio.to_thread(ping)
        assert not watch.done()
        await stub(channel).GetJob(image_pb2.GetJobRequest(), timeout=5)
        watch.cancel()


def _read_out(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while connection.recv(1 << 16):
            pass


async def test_new_connections_of_others_find_room_while_one_host_has_too_many() -> None:
    most = 64
    async with scripted_images(max_connections=most) as (server, _, _):
        with connections(server.address, most + 8, source=OTHER):
            for _ in range(4):
                async with open_channel(server.address) as newcomer:
                    await stub(newcomer).GetJob(image_pb2.GetJobRequest(), timeout=30)


async def test_large_metadata_is_refused_and_that_of_an_honest_caller_is_not() -> None:
    async with scripted_images() as (_, _, channel):
        call = stub(channel).GetJob
        await call(image_pb2.GetJobRequest(), metadata=(("baggage", "x" * 8192),), timeout=5)
        with pytest.raises(grpc.aio.AioRpcError):
            await call(image_pb2.GetJobRequest(), metadata=(("baggage", "x" * 40_000),), timeout=5)


class _OneKey:
    """A CallAuthenticator that knows whoever shows a key."""

    async def authenticate(self, identities: Sequence[str], metadata: Metadata) -> Caller:
        if any(key == "authorization" for key, _ in metadata):
            return Caller(role=Role.TENANT, name="shop", tenant="shop")
        raise Unauthenticated("who are you?")


@contextlib.asynccontextmanager
async def _serving_tenants(**config: Any) -> AsyncIterator[Server]:
    server = Server("scripted", ServerConfig(insecure=True, **config), authenticator=_OneKey())
    image_pb2_grpc.add_ImageServiceServicer_to_server(ScriptedImages(), server.grpc)  # type: ignore[abstract]
    await server.start()
    yield server
    await server.stop()


async def test_a_host_of_strangers_that_floods_is_kept_out_and_a_tenant_is_answered() -> None:
    async with _serving_tenants() as server, open_channel(server.address, api_key="btg") as channel:
        host, _, port = server.address.rpartition(":")

        def is_kept_out() -> bool:
            try:
                with socket.create_connection((host, int(port)), timeout=0.2, source_address=(OTHER, 0)):
                    return False
            except TimeoutError:
                return True

        with flooding(server.address, ["strangers:5000:2:0"], seconds=FLOOD_S, source=OTHER, to_the_end=False):
            while not await asyncio.to_thread(is_kept_out):
                await stub(channel).GetJob(image_pb2.GetJobRequest(), timeout=10)
            await stub(channel).GetJob(image_pb2.GetJobRequest(), timeout=10)
            async with open_channel(server.address, api_key="btg") as another:
                await stub(another).GetJob(image_pb2.GetJobRequest(), timeout=10)


async def test_a_tenants_call_behind_nine_thousand_calls_of_strangers_of_its_host_is_not_cut_off() -> None:
    async with _serving_tenants(max_calls=256, max_streams=256) as server:
        with contextlib.ExitStack() as stack, grpc.insecure_channel(server.address) as channel:
            get_job: Any = image_pb2_grpc.ImageServiceStub(channel).GetJob
            first = get_job.future(image_pb2.GetJobRequest(), metadata=KEY, timeout=60)
            codes = [await asyncio.to_thread(first.code)]
            # Meanwhile the event loop stands still, so that all calls wait in gRPC's queue.
            calls = _calls_behind_strangers(server.address, get_job, stack)
            codes += [await asyncio.to_thread(call.code) for call in calls]
            last = get_job.future(image_pb2.GetJobRequest(), metadata=KEY, timeout=60)
            codes.append(await asyncio.to_thread(last.code))
        assert set(codes) == {grpc.StatusCode.OK}


def _calls_behind_strangers(address: str, get_job: Any, stack: contextlib.ExitStack) -> list[Any]:
    """Begin calls of a tenant when gRPC has read 8,960 calls of strangers, and return them when they have arrived."""
    for _ in range(14):
        stack.enter_context(burst(address, 640, source="127.0.0.1"))
    port = int(address.rpartition(":")[2])
    wait_until(lambda: all(_unread_bytes(opened) == 0 for opened in open_sockets(port)), "gRPC to read all calls")
    calls = [get_job.future(image_pb2.GetJobRequest(), metadata=KEY, timeout=60) for _ in range(8)]
    time.sleep(0.3)  # for them to arrive
    return calls


def _unread_bytes(opened: socket.socket) -> int:
    """Return how many bytes of a connection gRPC has not read."""
    waiting = array.array("i", [0])
    with contextlib.suppress(OSError):  # the socket that listens
        fcntl.ioctl(opened.fileno(), termios.FIONREAD, waiting)
    return waiting[0]


def test_a_host_floods_by_calls_a_second_and_a_connection_of_somebody_known_is_remembered() -> None:
    ledger = ConnectionLedger()
    flood, lost = Peer(connection="a 1", host="a"), Peer(connection="b 1", host="b")
    for _ in range(300):
        ledger.refused(flood)
    ledger.refused(lost)
    ledger.account(lost)
    ledger.recognized(lost)
    assert ledger.floods() == {"a"}
    assert ledger.floods() == frozenset()
    assert ledger.found(lost.connection).known
    assert not ledger.found(flood.connection).known
    assert (ledger.knows("a"), ledger.knows("b")) == (False, True)


def test_queued_calls_of_an_ended_connection_or_of_a_banned_hosts_strangers_are_dropped() -> None:
    ledger = ConnectionLedger()
    ended, stranger, tenant = (Peer(connection=f"a {number}", host="a") for number in range(3))
    ledger.end(ended.connection)  # before any of its calls was handled
    for peer in (ended, stranger, tenant):
        ledger.account(peer)
    ledger.recognized(tenant)
    assert [ledger.drops_calls(peer) for peer in (ended, stranger, tenant)] == [True, False, False]
    ledger.set_banned(frozenset({"a"}))
    assert [ledger.drops_calls(peer) for peer in (ended, stranger, tenant)] == [True, True, False]


def test_a_host_is_known_for_a_day_after_a_tenant_called_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(connection_ledger, "time", SimpleNamespace(monotonic=lambda: now_s))
    ledger = ConnectionLedger()
    ledger.recognized(Peer(connection="office 1", host="office"))
    now_s = 16 * 3600.0  # a night
    assert ledger.knows("office")
    now_s = 25 * 3600.0
    assert not ledger.knows("office")


def test_a_connection_that_has_calls_is_remembered_however_many_others_come() -> None:
    ledger = ConnectionLedger()
    tenant = Peer(connection="tenant 1", host="proxy")
    ledger.account(tenant)
    ledger.recognized(tenant)
    for number in range(40_000):
        ledger.account(Peer(connection=f"stranger {number}", host="proxy"))
        if number % 10_000 == 0:
            ledger.account(tenant)
    assert ledger.found(tenant.connection).known


@contextlib.contextmanager
def _strangers(count: int) -> Iterator[tuple[int, list[socket.socket], list[socket.socket]]]:
    """Yield a port, and the ends of so many connections to it: those of the clients and those that are served."""
    with socket.create_server(("127.0.0.1", 0), backlog=count) as listening, contextlib.ExitStack() as stack:
        port = listening.getsockname()[1]
        clients, served = [], []
        for _ in range(count):
            clients.append(stack.enter_context(socket.create_connection(("127.0.0.1", port))))
            served.append(stack.enter_context(listening.accept()[0]))
            for end in (clients[-1], served[-1]):
                end.setblocking(False)
        yield port, clients, served


def _guard(ledger: ConnectionLedger, *, share: float = 0.5) -> ConnectionGuard:
    return ConnectionGuard(max_connections=100, share=share, busy=frozenset, ledger=ledger)


def _refuse(ledger: ConnectionLedger, client: socket.socket, *, times: int = 1) -> Peer:
    """Count so many refused calls of a connection, and return who has them."""
    peer = peer_of(f"ipv4:127.0.0.1:{client.getsockname()[1]}")
    ledger.account(peer)
    for _ in range(times):
        ledger.refused(peer)
    return peer


def _is_muted(ledger: ConnectionLedger, client: socket.socket) -> bool:
    return ledger.found(f"127.0.0.1 {client.getsockname()[1]}").muted


def _know_the_host(ledger: ConnectionLedger) -> None:
    """Let a known caller call from the clients' host, so that it cannot be kept out."""
    ledger.recognized(Peer(connection="another", host="127.0.0.1"))


def _flood(ledger: ConnectionLedger) -> None:
    """Let the clients' host flood, over a connection that has gone."""
    for _ in range(300):
        ledger.refused(Peer(connection="somebody else's", host="127.0.0.1"))


async def test_only_refused_connections_of_a_known_host_are_muted_and_later_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flood_defence, "_MUTED_S", 0.5)
    ledger = ConnectionLedger()
    with _strangers(4) as (port, clients, served):
        *refused, newcomer = clients
        for client in refused:
            _refuse(ledger, client, times=100)
        _know_the_host(ledger)

        def muted() -> list[bool]:
            return [_is_muted(ledger, client) for client in clients]

        async with _guard(ledger).looking(port):
            await eventually(lambda: sum(muted()) == 1)
            were_muted = muted()
            assert not any(map(_is_ended, clients))
            for client in clients:
                client.sendall(b"a call")
            await eventually(lambda: [_has_data(end) for end in served] == [not was_muted for was_muted in were_muted])
            await eventually(lambda: sum(map(_is_ended, refused)) == 1)
            assert not any(muted()), "another connection may get the port of the one that was ended"
        assert not _is_ended(newcomer)


async def test_a_connection_with_very_many_refused_calls_is_muted_although_it_is_the_only_one() -> None:
    ledger = ConnectionLedger()
    with _strangers(2) as (port, (flood, wrong_key), _):
        _refuse(ledger, flood, times=300)
        _refuse(ledger, wrong_key, times=3)
        _know_the_host(ledger)
        async with _guard(ledger).looking(port):
            await eventually(lambda: _is_muted(ledger, flood))
        assert not _is_muted(ledger, wrong_key)


async def test_thirty_new_connections_of_a_flooding_host_are_read_and_those_with_many_calls_are_not() -> None:
    ledger = ConnectionLedger()
    with _strangers(40) as (port, clients, _):
        few, many = clients[:30], clients[30:]
        for client in clients:
            client.sendall(b"x" * (20_000 if client in many else 2_000))
        _flood(ledger)
        _know_the_host(ledger)
        async with _guard(ledger).looking(port):
            await eventually(lambda: all(_is_muted(ledger, client) for client in many))
        assert not any(_is_muted(ledger, client) for client in few)


@contextlib.asynccontextmanager
async def _admitted_again(
    ledger: ConnectionLedger, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[socket.socket, Callable[[], None]]]:
    """Yield a guarded socket that listens, just after the clients' host was banned for a flood, and what ends the
    probation of that host.
    """
    clock = FakeTime()
    monkeypatch.setattr(source_filter, "time", clock)
    monkeypatch.setattr(flood_defence, "_BANNED_S", 0.0)
    for name in ("_ROUND_S", "_REST_ROUND_S"):
        monkeypatch.setattr(connection_limits, name, 0.1)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        async with _guard(ledger).looking(listening.getsockname()[1]):
            with socket.create_connection(listening.getsockname()) as first, listening.accept()[0]:
                first.setblocking(False)
                _flood(ledger)
                await eventually(lambda: _is_ended(first))

            def end_probation() -> None:
                clock.now += 3600

            yield listening, end_probation


async def _connected(
    listening: socket.socket, count: int, stack: contextlib.ExitStack
) -> tuple[list[socket.socket], list[socket.socket]]:
    """Return the ends of so many connections, those of the clients and those that are served, beside the guard."""
    clients, served = [], []
    for _ in range(count):
        connecting = asyncio.to_thread(socket.create_connection, listening.getsockname(), timeout=20)
        clients.append(stack.enter_context(await connecting))
        served.append(stack.enter_context(listening.accept()[0]))
        for end in (clients[-1], served[-1]):
            end.setblocking(False)
    return clients, served


async def test_bulk_data_of_a_host_that_is_admitted_again_comes_from_one_connection_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flood_defence, "_LET_THROUGH_S", 600.0)
    ledger = ConnectionLedger()
    async with _admitted_again(ledger, monkeypatch) as (listening, _):
        with contextlib.ExitStack() as stack:
            clients, served = await _connected(listening, 12, stack)
            *flood, newcomer = clients
            for client in flood:
                client.sendall(b"x" * 20_000)
            newcomer.sendall(b"x" * 1_000)

            def read() -> list[socket.socket]:
                return [client for client, end in zip(clients, served, strict=True) if _has_data(end)]

            await eventually(lambda: newcomer in read() and len(read()) == 2)
            first = [client for client in read() if client is not newcomer]
            await asyncio.sleep(0.5)  # some rounds
            assert len(read()) == 2
            for client in first:
                _refuse(ledger, client)
            await eventually(lambda: len(read()) == 3)


async def test_a_host_whose_connections_bring_bulk_data_until_the_end_of_its_probation_is_banned_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger = ConnectionLedger()
    async with _admitted_again(ledger, monkeypatch) as (listening, end_probation):
        with contextlib.ExitStack() as stack:
            clients, _ = await _connected(listening, 30, stack)
            for client in clients:
                client.sendall(b"x" * 20_000)
            await asyncio.sleep(0.5)  # some rounds
            assert not any(map(_is_ended, clients))
            end_probation()
            await eventually(lambda: all(map(_is_ended, clients)))


@pytest.mark.parametrize("why", ["a tenant called from it", "its probation is over"])
async def test_all_data_of_a_host_arrives_once(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = ConnectionLedger()
    async with _admitted_again(ledger, monkeypatch) as (listening, end_probation):
        with contextlib.ExitStack() as stack:
            clients, served = await _connected(listening, 8 if "tenant" in why else 2, stack)
            if "tenant" in why:
                for client in clients:
                    client.sendall(b"x" * 20_000)
                _know_the_host(ledger)
            else:
                end_probation()  # nothing was sent before
                await asyncio.sleep(0.5)  # some rounds
                for client in clients:
                    client.sendall(b"x" * 20_000)
            await eventually(lambda: all(map(_has_data, served)))


async def test_a_muted_connection_that_is_ended_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flood_defence, "_MUTED_S", 0.1)
    ledger = ConnectionLedger()
    with _strangers(1) as (port, (client,), (served,)):
        _refuse(ledger, client, times=300)
        _know_the_host(ledger)
        async with _guard(ledger).looking(port):
            await eventually(lambda: _is_ended(client))
        client.close()
        # While a filter drops what the client sends, the system waits for its acknowledgement for minutes.
        await eventually(lambda: served.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in CLOSED)


async def test_a_muted_connection_that_brought_much_data_is_not_ended_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "_IDLE_TALK_BYTES", 1_000)
    monkeypatch.setattr(connection_limits, "_BUSY_SHARE", -1.0)  # look at each connection's traffic in every round
    monkeypatch.setattr(connection_ledger, "_CALL_BYTES", 0)
    ledger = ConnectionLedger()
    with _strangers(2) as (port, (flood, talker), _):
        _refuse(ledger, flood, times=300)
        _know_the_host(ledger)
        flood.sendall(b"x" * 20_000)
        async with _guard(ledger).looking(port):
            await eventually(lambda: _is_muted(ledger, flood))
            talker.sendall(b"x" * 20_000)
            await eventually(lambda: _is_ended(talker))
            assert not _is_ended(flood)


async def test_a_look_during_a_flood_lets_the_event_loop_go_on_between_its_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inbound_connections, "_PIECE", 4)
    ledger = ConnectionLedger()
    looks = turns = 0

    def some_turns(port: int) -> Iterator[InboundConnection]:
        nonlocal looks
        for number in range(40):
            yield InboundConnection(descriptor=-1, peer=f"10.0.0.1 {number}", host="10.0.0.1")
        looks += 1

    monkeypatch.setattr(connection_limits, "connections", some_turns)
    with _strangers(0) as (port, _, _):
        async with _guard(ledger).looking(port):
            await asyncio.sleep(0.05)
            _flood(ledger)
            _know_the_host(ledger)
            while not looks:
                turns += 1
                await asyncio.sleep(0)
    assert turns >= 10


def _has_data(connection: socket.socket) -> bool:
    with contextlib.suppress(BlockingIOError):
        return bool(connection.recv(16, socket.MSG_PEEK))
    return False


async def test_a_guard_that_sleeps_at_rest_is_woken_by_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "_SLEEP_AFTER_S", 0.0)
    monkeypatch.setattr(connection_limits, "_SLEEP_ROUND_S", 600.0)
    asleep = asyncio.Event()
    wait = ConnectionLedger.wait_for_work

    async def wait_for_work(ledger: ConnectionLedger, within_s: float) -> bool:
        asleep.set()
        return await wait(ledger, within_s)

    monkeypatch.setattr(ConnectionLedger, "wait_for_work", wait_for_work)
    most = 8 * open_file_count()
    async with scripted_images(max_connections=most) as (server, _, channel):
        await asyncio.wait_for(asleep.wait(), 30)
        crowd = connections(server.address, most // 2 + 8, source=OTHER)
        opened = await asyncio.to_thread(crowd.__enter__)  # the event loop has to see them

        def one_more() -> None:
            with connections(server.address, 1, source=OTHER):
                pass

        async def excess_ended() -> bool:
            # gRPC may have accepted the last one before the event loop saw it, which only a round would mend.
            await asyncio.to_thread(one_more)
            return alive(opened) < len(opened)

        try:
            await eventually(excess_ended, "an excess connection to be ended", within_s=30)
        finally:
            crowd.__exit__(None, None, None)
        await stub(channel).GetJob(image_pb2.GetJobRequest(), timeout=5)


def _is_ended(client: socket.socket) -> bool:
    with contextlib.suppress(BlockingIOError):
        return client.recv(1) == b""
    return False


@pytest.mark.parametrize("share", [0.5, 1.0])
async def test_a_host_that_may_have_all_is_a_proxy_and_loses_no_connection_by_strangers_calls(share: float) -> None:
    ledger = ConnectionLedger()
    with _strangers(1) as (port, (client,), _):
        _flood(ledger)
        async with _guard(ledger, share=share).looking(port):
            if share < 1:
                await eventually(lambda: _is_ended(client))
            else:
                await asyncio.sleep(0.6)  # some looks
                assert not _is_ended(client)
