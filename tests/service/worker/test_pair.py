"""Two real workers as a pair; `make chaos` kills one in the middle of a step (kill-peers)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from bottega import kinds
from bottega.rpc.channel import channel_options
from bottega.v1 import fleet_pb2, fleet_pb2_grpc, link_pb2, link_pb2_grpc, lora_pb2, lora_pb2_grpc
from bottega.v1.generation_pb2 import Lora
from tests.samples.lora_files import Part, base_shapes, kohya, save
from tests.support.running_loras import upload_requests
from tests.support.services import FREE_PORTS, SMALL_ENGINE, Services
from tests.support.stock import assert_same_image
from tests.support.waiting import wait_until
from tests.support.worker_pair import TIMEOUT_S, Drawn, WorkerPair


class Fleet(fleet_pb2_grpc.FleetServiceServicer):
    """Tells the pair which services there are."""

    def __init__(self) -> None:
        self.services: list[fleet_pb2.ServiceAddress] = []

    def Join(
        self, request_iterator: Iterator[fleet_pb2.JoinRequest], context: grpc.ServicerContext
    ) -> Iterator[fleet_pb2.JoinResponse]:
        for _ in request_iterator:
            yield fleet_pb2.JoinResponse(services=self.services)


@pytest.fixture(scope="module")
def fleet() -> Fleet:
    return Fleet()  # type: ignore[abstract]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, fleet: Fleet) -> Iterator[WorkerPair]:
    server = grpc.server(ThreadPoolExecutor(4), options=channel_options())
    fleet_pb2_grpc.add_FleetServiceServicer_to_server(fleet, server)
    gateway = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    with WorkerPair(tmp_path_factory.mktemp("pair"), SMALL_ENGINE, gateway=gateway) as pair:
        yield pair
    server.stop(0).wait()


def test_each_draws_the_same_image_with_the_other_as_alone(pair: WorkerPair) -> None:
    alone = pair.alone("a")
    assert not alone.provenance.HasField("pair")
    for name, other in (("a", "b"), ("b", "a")):
        drawn = pair.draw(name)
        assert_same_image(drawn.pixels, alone.pixels)
        assert drawn.provenance.exact
        assert drawn.provenance.pair.worker == other
        assert drawn.lent_steps > 0


def test_the_link_within_a_host_is_shared_memory(pair: WorkerPair) -> None:
    linked = [line for line in pair.worker("a").events() if line.get("event") == "linked to the peer"]
    assert linked[-1]["backend"] == "memfd"


def refusal_of_b(pair: WorkerPair, worker: str, model_hash: str) -> grpc.RpcError:
    """What a worker that draws with this model hears when it asks to lead b."""
    drawn_with = {"model_hash": model_hash, "dtype": "float32"}
    terms = [link_pb2.LinkTerm(name=name, value=value) for name, value in drawn_with.items()]
    with grpc.insecure_channel(pair.worker("b").address, options=channel_options()) as channel:
        stub = link_pb2_grpc.LinkServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.OpenLink(link_pb2.OpenLinkRequest(kind=kinds.WORKER, worker=worker, terms=terms), timeout=TIMEOUT_S)
    return caught.value


def test_a_pair_of_two_models_is_refused_with_both_named(pair: WorkerPair) -> None:
    refusal = refusal_of_b(pair, "a", "another")
    assert refusal.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "workers a and b cannot be a pair" in str(refusal.details())
    assert "model another" in str(refusal.details())
    assert refusal_of_b(pair, "", "another").code() == grpc.StatusCode.INVALID_ARGUMENT


def test_a_third_worker_cannot_lead_one_that_has_its_peer(pair: WorkerPair) -> None:
    model_hash = pair.draw("b").provenance.model_hash
    assert "already computes for a" in str(refusal_of_b(pair, "c", model_hash).details())


def test_rows_with_a_lora_are_lent_too_once_the_other_has_fetched_it_from_the_store(
    pair: WorkerPair, fleet: Fleet, tmp_path: Path
) -> None:
    drawings: list[Drawn] = []
    with Services(tmp_path) as services:
        store = services.start("loras", {"name": "loras", "gateway": "", "server": FREE_PORTS})
        fleet.services = [fleet_pb2.ServiceAddress(kind=kinds.LORAS, name="loras", address=store.address)]
        lora = Lora(name="ink", scale=1.0, max_step=0, digest=_brought(store.address, tmp_path))

        def is_lent() -> bool:
            drawings.append(pair.draw("a", loras=[lora]))
            return drawings[-1].lent_steps > 0

        wait_until(is_lent, "the other's share")
        alone = pair.alone("a", loras=[lora])
    assert_same_image(drawings[-1].pixels, alone.pixels)
    assert (drawings[-1].pixels != pair.alone("a").pixels).any()


def _brought(store: str, folder: Path) -> str:
    """The digest of a LoRA that a store has from now on."""
    parts = {("unet", path): Part(rank=4, alpha=2.0) for path in base_shapes("unet") if path.endswith("to_q")}
    data = save(kohya(parts)[0], folder / "ink.safetensors").read_bytes()
    with grpc.insecure_channel(store, options=channel_options()) as channel:
        stub = lora_pb2_grpc.LoraServiceStub(channel)
        answer: lora_pb2.UploadLoraResponse = stub.UploadLora(upload_requests("ink", data), timeout=TIMEOUT_S)
    return answer.lora.digest
