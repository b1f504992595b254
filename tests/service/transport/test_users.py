"""Links of one machine are for one user, or for a group that shares them, whatever another user knows or has made."""

from __future__ import annotations

import asyncio
import grp
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from bottega.errors import AuthFailed
from bottega.transport import Backend, Endpoints, LinkListener, Offer, connect, offer_from_wire, offer_to_wire
from tests.support import running_activations, running_cache, running_loras
from tests.support.other_user import GROUP, USER, needs_root, run_as_another
from tests.support.transport_backends import LAYOUT, content, patience, write
from tests.support.waiting import wait_until

pytestmark = needs_root

# A group that every Debian has, and no process here.
SHARED = "games"

# Takes up an offer as a worker does, by shared memory alone, and says what came of it.
_IMPORTS = """
import encodings.ascii
from bottega.errors import BottegaError
from bottega.transport import Backend, Deadline, connect, offer_from_wire
from bottega.v1.link_pb2 import LinkOffer
offer = offer_from_wire(LinkOffer.FromString(bytes.fromhex(sys.argv[1])))
"""
_CONNECT = """
try:
    with connect(offer, Deadline.after(5), backends=(Backend.MEMFD,)) as link:
        with link.recv(Deadline.after(5)) as incoming:
            incoming.wait_all(Deadline.after(5))
            print("received", sum(len(incoming.view(at)) for at in range(len(incoming.layout.specs))), "bytes")
except BottegaError as error:
    print(type(error).__name__, error.message)
"""
# Listens where a service of ours once did, and says how much it hears of whoever comes.
_LISTEN = """
with socket.socket(socket.AF_UNIX) as listening:
    listening.bind(sys.argv[1])
    os.chmod(sys.argv[1], 0o666)
    listening.listen()
    listening.settimeout(20)
    with listening.accept()[0] as connection:
        print("heard", len(connection.recv(4096)), "bytes")
"""


@pytest.fixture(autouse=True)
def _without_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BOTTEGA_LINKS_GROUP", raising=False)


def _taken_up_by_another(offer: Offer, *, group: int = GROUP) -> str:
    encoded = offer_to_wire(offer).SerializeToString().hex()
    return run_as_another(_CONNECT, encoded, imports=_IMPORTS, group=group)


def test_another_user_does_not_reach_the_socket(public_folder: Path) -> None:
    with LinkListener(Endpoints(unix_path=public_folder / "links.sock")) as listener:
        assert "Permission denied" in _taken_up_by_another(listener.offer())


def test_another_user_with_the_token_who_reaches_the_socket_is_turned_away(
    public_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    path = public_folder / "links.sock"
    with LinkListener(Endpoints(unix_path=path)) as listener:
        path.chmod(0o666)  # as if the first hurdle were not there
        offer = listener.offer()
        assert _taken_up_by_another(offer).startswith(("AuthFailed", "PeerDead"))
        turned_away = [line.__dict__["why"] for line in caplog.records if "was refused" in line.message]
        assert any(f"user {USER}" in why for why in turned_away)
        ours = offer
        with connect(ours, patience()) as near, listener.accept(offer, patience()):
            assert near.backend_choice.backend == Backend.MEMFD, "the other user used nothing up"


@pytest.mark.parametrize("stores", [running_activations, running_cache, running_loras])
async def test_another_user_gets_no_link_to_a_store(stores: ModuleType, tmp_path: Path, public_folder: Path) -> None:
    path = public_folder / "links.sock"
    settings = stores.config()
    settings = replace(settings, links=replace(settings.links, socket=str(path)))
    async with stores.running(tmp_path / "store", settings) as store:
        path.chmod(0o666)  # as if the first hurdle were not there
        told = await asyncio.to_thread(_taken_up_by_another, offer_from_wire(await store.open_link()))
    assert told.startswith(("AuthFailed", "PeerDead")), told


def test_a_socket_that_another_user_put_there_hears_nothing(public_folder: Path) -> None:
    theirs = public_folder / "theirs"
    theirs.mkdir()
    os.chown(theirs, USER, GROUP)
    path = theirs / "links.sock"
    with LinkListener(Endpoints(unix_path=public_folder / "links.sock")) as listener:
        offer = listener.offer()
    assert offer.memfd is not None
    lured = replace(offer, memfd=replace(offer.memfd, path=str(path)))
    with ThreadPoolExecutor(1) as pool:
        heard = pool.submit(run_as_another, _LISTEN, path, imports="import socket")
        wait_until(lambda: path.exists() and path.stat().st_mode & 0o777 == 0o666, "the other user's socket")
        with pytest.raises(AuthFailed, match=rf"not trusted: it is a process of user {USER}, .* for user root"):
            connect(lured, patience(), backends=(Backend.MEMFD,))
        assert heard.result(30) == "heard 0 bytes"


def test_services_that_are_other_users_share_links_by_their_group(
    public_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOTTEGA_LINKS_GROUP", SHARED)
    shared = grp.getgrnam(SHARED).gr_gid
    os.chown(public_folder, -1, shared)
    public_folder.chmod(0o750)  # as systemd makes it for RuntimeDirectoryMode=0750
    with LinkListener(Endpoints(unix_path=public_folder / "links.sock")) as listener, ThreadPoolExecutor(1) as pool:
        offer = listener.offer()
        told = pool.submit(_taken_up_by_another, offer, group=shared)
        with listener.accept(offer, patience()) as far:
            write(far, LAYOUT, content(LAYOUT, 1))
            assert told.result(30) == f"received {sum(spec.size_bytes for spec in LAYOUT.specs)} bytes"


def test_a_group_that_does_not_share_links_gets_none(public_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOTTEGA_LINKS_GROUP", SHARED)
    path = public_folder / "links.sock"
    with LinkListener(Endpoints(unix_path=path)) as listener:
        assert "Permission denied" in _taken_up_by_another(listener.offer())
        path.chmod(0o666)
        assert _taken_up_by_another(listener.offer()).startswith(("AuthFailed", "PeerDead"))
