"""Two real workers as a pair; `make chaos` kills one in the middle of a step (kill-peers)."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from bottega import kinds
from bottega.rpc.channel import channel_options
from bottega.v1 import link_pb2, link_pb2_grpc
from tests.support.services import SMALL_ENGINE
from tests.support.stock import assert_same_image
from tests.support.worker_pair import TIMEOUT_S, WorkerPair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerPair]:
    with WorkerPair(tmp_path_factory.mktemp("pair"), SMALL_ENGINE) as pair:
        yield pair


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
