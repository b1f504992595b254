"""Bad input to a LoRA store, a real process: every method answers, nothing is its own fault, and it goes on."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import hypothesis
import pytest
from google.protobuf.message import Message
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st

from bottega.rpc.channel import channel_options
from bottega.v1 import lora_pb2 as pb
from tests.fuzz.mutations import mutated
from tests.lora_files import Part, kohya, save
from tests.running import Service, Services

_MODULE = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
_SERVICE = pb.DESCRIPTOR.services_by_name["LoraService"]
_REQUESTS = {"UploadLora": 25, "RegisterLora": 40}
_MOST_REQUESTS = 120
_ANSWER_S = 30.0
# What a store may answer to anybody. RESOURCE_EXHAUSTED: a thousand offers of links that nobody takes up.
_S = grpc.StatusCode
_MAY = {
    _S.OK,
    _S.INVALID_ARGUMENT,
    _S.NOT_FOUND,
    _S.ALREADY_EXISTS,
    _S.FAILED_PRECONDITION,
    _S.RESOURCE_EXHAUSTED,
}
_WORDS = ("ink", "miniature", "a.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("lora-fuzz")
    tensors, _ = kohya({("unet", _MODULE): Part(rank=1, alpha=1.0)})
    save(tensors, made / "a.safetensors")
    return made


@pytest.fixture(scope="module")
def store(folder: Path) -> Iterator[Service]:
    server = {"listen": "127.0.0.1:0", "metrics_listen": "127.0.0.1:0"}
    settings = {"gateway": "", "server": server, "imports": {"root": str(folder)}}
    with Services(folder) as services:
        yield services.start("bottega.loras", settings, name="store")


@pytest.fixture(scope="module")
def channel(store: Service) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(store.address, options=channel_options()) as channel:
        yield channel


def _whole(method: str, folder: Path) -> Sequence[Message]:
    """Valid requests; of UploadLora the messages of one."""
    data = (folder / "a.safetensors").read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    match method:
        case "UploadLora":
            head = pb.UploadLoraHead(name="up", base="miniature", sha256=sha256, size_bytes=len(data))
            return [pb.UploadLoraRequest(head=head), pb.UploadLoraRequest(chunk=data)]
        case "RegisterLora":
            return [pb.RegisterLoraRequest(name="ink", base="miniature", path="a.safetensors", trigger_words=["ink"])]
        case "ListLoras":
            return [pb.ListLorasRequest(), pb.ListLorasRequest(page_size=9, page_token="a", base="miniature")]
        case "PrefetchLoras":
            return [pb.PrefetchLorasRequest(digests=["ab" * 32, sha256], only_keep=keep) for keep in (False, True)]
        case "SetLoraProfile":
            bounds = [pb.LoraBound(num_inference_steps=30, max_step=6)]
            return [pb.SetLoraProfileRequest(name="ink", digest=sha256, bounds=bounds)]
        case "OpenLoraLink":
            return [pb.OpenLoraLinkRequest(worker="w"), pb.OpenLoraLinkRequest(worker="w", link_id="0" * 32)]
        case _:
            return [getattr(pb, f"{method}Request")(name="ink")]


def _requests(method: str, folder: Path) -> st.SearchStrategy[tuple[bytes, ...]]:
    whole = _whole(method, folder)
    if method == "UploadLora":
        return st.tuples(*(mutated([message], _WORDS) for message in whole))
    return mutated(whole, _WORDS).map(lambda raw: (raw,))


def _call(channel: grpc.Channel, method: str, raw: tuple[bytes, ...]) -> tuple[grpc.StatusCode, str]:
    path = f"/{_SERVICE.full_name}/{method}"
    try:
        if method == "UploadLora":
            upload: Any = channel.stream_unary(path)
            upload(iter(raw), timeout=_ANSWER_S)
        else:
            ask: Any = channel.unary_unary(path)
            ask(raw[0], timeout=_ANSWER_S)
    except grpc.RpcError as error:
        failure: Any = error
        return failure.code(), str(failure.details())
    return _S.OK, ""


# Last what takes away what the others ask for.
@pytest.mark.parametrize("method", sorted((m.name for m in _SERVICE.methods), key=lambda name: name == "DeleteLora"))
def test_whatever_is_asked_the_store_answers_and_lives(
    store: Service, channel: grpc.Channel, folder: Path, method: str
) -> None:
    codes: Counter[grpc.StatusCode] = Counter()
    _call(channel, "RegisterLora", (_whole("RegisterLora", folder)[0].SerializeToString(),))

    @hypothesis.settings(
        max_examples=_REQUESTS.get(method, _MOST_REQUESTS),
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.seed(7)
    @hypothesis.given(_requests(method, folder))
    def answered(raw: tuple[bytes, ...]) -> None:
        code, text = _call(channel, method, raw)
        codes[code] += 1
        assert code in _MAY, f"{code.name}: {text[:300]} to {[part[:200] for part in raw]}"
        assert store.process.poll() is None

    answered()
    assert codes.total() > codes[_S.OK], "requests that are all taken try nothing"
    errors = [event for event in store.events() if event.get("level") in {"ERROR", "CRITICAL"}]
    assert not errors
