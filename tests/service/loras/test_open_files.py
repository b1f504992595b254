"""A store that may have few files open: memory takes as many small LoRAs as leave it enough for all else."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from bottega import kinds
from bottega.errors import TooLarge
from bottega.loras.catalogue import LoraCatalogue
from bottega.loras.files import LoraFolder
from bottega.loras.records import CatalogueRecord
from bottega.rpc.status import from_rpc_error
from bottega.transport import Deadline, Limits, Link, connect
from bottega.v1 import lora_pb2 as pb
from bottega.v1 import lora_pb2_grpc
from tests.support.offers import ask_offer
from tests.support.running_loras import PATIENCE_S, fetch
from tests.support.services import FREE_PORTS, Service, Services
from tests.support.shared_loras import canonical_file
from tests.support.waiting import wait_until

_SOFT, _HARD = 60, 100
_MOST = _HARD // 2
_COUNT = 120


async def _fill(folder: Path) -> list[str]:
    """Brings LoRAs as an importer leaves them; their digests, in the order of their names."""
    files = LoraFolder(folder / "files", quarantine=folder / "quarantine", budget_bytes=1 << 30, min_free_bytes=0)
    catalogue = LoraCatalogue(folder / "catalogue.db")
    await catalogue.open()
    files.open()
    digests = []
    for number in range(_COUNT):
        spool = files.spool()
        spool.write_bytes(canonical_file((1, 8), seed=number))
        digest, lora = files.adopt(spool)
        record = CatalogueRecord(
            name=_name(number),
            digest=digest,
            base="miniature",
            rank=lora.rank,
            modules=len(lora.modules),
            size_bytes=lora.file_bytes,
            text_bytes=lora.text_bytes,
            trigger_words=(),
            format="kohya",
            added_s=time.time(),
        )
        await catalogue.add(record)
        digests.append(digest)
    await catalogue.close()
    return digests


def _name(number: int) -> str:
    return f"lora-{number:03}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def digests(folder: Path) -> list[str]:
    return asyncio.run(_fill(folder / "loras"))


@pytest.fixture(scope="module")
def store(digests: list[str], folder: Path) -> Iterator[Service]:
    assert len(digests) == _COUNT
    settings = {"gateway": "", "server": FREE_PORTS, "folder": str(folder / "loras"), "links": {"socket": None}}
    limited = ["prlimit", f"--nofile={_SOFT}:{_HARD}"]
    with Services(folder) as services:
        yield services.start("loras", settings, run_by=limited)


@pytest.fixture(scope="module")
def stub(store: Service) -> Iterator[lora_pb2_grpc.LoraServiceStub]:
    with grpc.insecure_channel(store.address) as channel:
        yield lora_pb2_grpc.LoraServiceStub(channel)


def _link(store: Service, worker: str) -> Link:
    offer = ask_offer(store.address, kinds.LORAS, worker=worker).offer
    limits = Limits(slots=2, slot_bytes=1 << 20)
    return connect(offer, Deadline.after(PATIENCE_S), limits=limits)


def test_a_store_of_more_small_loras_than_it_may_have_files_open_sends_all_of_them_and_answers_others(
    store: Service, stub: lora_pb2_grpc.LoraServiceStub, digests: list[str]
) -> None:
    process = psutil.Process(store.process.pid)
    assert process.rlimit(psutil.RLIMIT_NOFILE) == (_HARD, _HARD), "it takes what it may"
    with _link(store, "w") as link:
        for number, digest in enumerate(digests):
            assert hashlib.sha256(fetch(link, digest, number + 1)).hexdigest() == digest
        with _link(store, "another") as other:
            fetch(other, digests[0])
        loras = stub.ListLoras(pb.ListLorasRequest(page_size=1000), timeout=PATIENCE_S).loras
    assert len(loras) == _COUNT
    assert sum(lora.state == pb.LORA_STATE_IN_MEMORY for lora in loras) == _MOST
    assert process.num_fds() < _HARD


def test_no_more_loras_are_pinned_than_may_be_open_and_others_come_from_the_disk(
    store: Service, stub: lora_pb2_grpc.LoraServiceStub, digests: list[str]
) -> None:
    for number in range(_MOST):
        stub.PinLora(pb.PinLoraRequest(name=_name(number), pinned=True), timeout=PATIENCE_S)
    with pytest.raises(grpc.RpcError) as caught:
        stub.PinLora(pb.PinLoraRequest(name=_name(_MOST), pinned=True), timeout=PATIENCE_S)
    error = from_rpc_error(caught.value)
    assert (type(error), error.metadata) == (TooLarge, {"limit": "open_files"})
    with _link(store, "w") as link:
        assert hashlib.sha256(fetch(link, digests[-1])).hexdigest() == digests[-1]

    def in_memory() -> set[str]:
        loras = stub.ListLoras(pb.ListLorasRequest(page_size=1000), timeout=PATIENCE_S).loras
        return {lora.name for lora in loras if lora.state == pb.LORA_STATE_IN_MEMORY}

    wait_until(lambda: in_memory() == {_name(number) for number in range(_MOST)}, "all loads")
