"""One call of any method with any bytes, and what came of it. What a call began is ended at once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from bottega import kinds
from bottega.rpc.channel import MAX_ATTEMPT_MIB, channel_options
from bottega.rpc.status import from_rpc_error
from bottega.v1 import (
    activations_pb2,
    cache_pb2,
    controlnet_pb2,
    fleet_pb2,
    image_pb2,
    link_pb2,
    lora_pb2,
    webhook_pb2,
    worker_pb2,
)
from bottega.v1.error_pb2 import ERROR_REASON_NO_CONTROLNET
from bottega.v1.generation_pb2 import GenerationSpec
from tests.support.services import Service

# Of the channels: a service refuses by itself what is little more than it takes.
MESSAGE_MIB = MAX_ATTEMPT_MIB + 1

# A service answers any single request in far less, or it hangs; and a worker that was measured on a busy machine is not
# told to be too slow for it.
ANSWER_S = 60.0
# A stream that has nothing to say is open when it has not been refused for so long.
_SILENT_S = 0.01

SERVICES: Mapping[str, str] = MappingProxyType(
    {
        method.name: file.services_by_name[service].full_name
        for file, service in (
            (image_pb2.DESCRIPTOR, "ImageService"),
            (fleet_pb2.DESCRIPTOR, "FleetService"),
            (webhook_pb2.DESCRIPTOR, "WebhookService"),
            (worker_pb2.DESCRIPTOR, "WorkerService"),
            (controlnet_pb2.DESCRIPTOR, "ControlNetService"),
            (lora_pb2.DESCRIPTOR, "LoraService"),
            (cache_pb2.DESCRIPTOR, "CacheService"),
            (activations_pb2.DESCRIPTOR, "ActivationService"),
            (activations_pb2.DESCRIPTOR, "TemplateService"),
            (link_pb2.DESCRIPTOR, "LinkService"),
        )
        for method in file.services_by_name[service].methods
    }
)
"""Full name of the service by the method's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a call ended. text: all that the service said in words. fields: that it named as wrong."""

    code: grpc.StatusCode
    text: str = ""
    fields: frozenset[str] = frozenset()


# Whose fault these are.
_OURS = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN})
_ORDER = image_pb2.SubmitJobRequest(spec=GenerationSpec(model="other", prompt="a star")).SerializeToString()
_FINE = Outcome(code=grpc.StatusCode.OK)


class Caller:
    """Calls the methods of a gateway, a worker, a ControlNet server, a LoRA store, a cache and a store of activations,
    with bytes as they are.

    channels: by the service of the contract. See `calling`.
    """

    def __init__(self, channels: Mapping[str, grpc.Channel]) -> None:
        self.channels = channels
        self._reader = ThreadPoolExecutor(1)
        nets, store, worker = (channels[name] for name in ("ControlNetService", "LoraService", "WorkerService"))
        self._linked = {
            kinds.ACTIVATIONS: channels["ActivationService"],
            kinds.CACHE: channels["CacheService"],
            kinds.CONTROLNET: nets,
            kinds.LORAS: store,
            kinds.WORKER: worker,
        }
        self._special: Mapping[str, Callable[[tuple[bytes, ...]], Outcome]] = {
            "Generate": self._generate,
            "SubmitJob": self._submit,
            "WatchJob": self._watch,
            "GetImage": lambda raw: self._read("GetImage", raw),
            "Join": self._join,
            "RunAttempt": self._run_attempt,
            "WatchCheckpoints": self._watch_checkpoints,
            "OpenLink": self._open_link,
            "UploadLora": self._upload,
        }

    def close(self) -> None:
        """Ends what reads along; the channels are not its own."""
        self._reader.shutdown()

    def call(self, method: str, raw: tuple[bytes, ...]) -> Outcome:
        """Calls, and ends what that began."""
        try:
            special = self._special.get(method)
            return special(raw) if special else self._ask(method, raw)
        except grpc.RpcError as error:
            return _refused(error)

    def _ask(self, method: str, raw: tuple[bytes, ...]) -> Outcome:
        self._unary(method, raw[0])
        return _FINE

    def _generate(self, raw: tuple[bytes, ...]) -> Outcome:
        call = self._stream("Generate", raw[0])
        try:
            first = image_pb2.GenerateResponse.FromString(next(call))
        finally:
            call.cancel()
        self._cancel(first.event.job_id)
        return _FINE

    def _submit(self, raw: tuple[bytes, ...]) -> Outcome:
        answer = image_pb2.SubmitJobResponse.FromString(self._unary("SubmitJob", raw[0]))
        self._cancel(answer.job.job_id)
        return _FINE

    def _watch(self, raw: tuple[bytes, ...]) -> Outcome:
        call = self._stream("WatchJob", raw[0])
        try:
            first = image_pb2.WatchJobResponse.FromString(next(call)).event
        finally:
            call.cancel()
        return Outcome(code=grpc.StatusCode.OK, text=str(first.failed) if first.HasField("failed") else "")

    def _read(self, method: str, raw: tuple[bytes, ...]) -> Outcome:
        for _ in self._stream(method, raw[0]):
            pass
        return _FINE

    def _upload(self, raw: tuple[bytes, ...]) -> Outcome:
        method: Any = self._channel("UploadLora").stream_unary(_path("UploadLora"))
        method(iter(raw), timeout=ANSWER_S)
        return _FINE

    def _join(self, raw: tuple[bytes, ...]) -> Outcome:
        """While the newcomer is there, something is ordered from it; how that ends is what is told."""
        answered, ordered = threading.Event(), list[Outcome]()

        def said() -> Iterator[bytes]:
            yield from raw
            if raw and answered.wait(ANSWER_S) and ordered:
                ordered[0] = self.call("SubmitJob", (_ORDER,))

        method: Any = self.channels["FleetService"].stream_stream(_path("Join"))
        try:
            for _ in method(said(), timeout=ANSWER_S):
                ordered[:] = ordered or [_FINE]
                answered.set()
        finally:
            answered.set()
        return ordered[0] if ordered and ordered[0].code in _OURS else _FINE

    def _watch_checkpoints(self, raw: tuple[bytes, ...]) -> Outcome:
        # What is no message must be refused, which on a busy machine takes longer than an open stream is listened to.
        timeout_s = _SILENT_S if _is_watch(raw[0]) else ANSWER_S
        call = self._stream("WatchCheckpoints", raw[0], timeout_s=timeout_s)
        try:
            next(call)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
        finally:
            call.cancel()
        return _FINE

    def _open_link(self, raw: tuple[bytes, ...]) -> Outcome:
        """The worker has no peer; a request with nothing else wrong is told so."""
        ask: Any = self._linked.get(_link_kind(raw[0]), self._linked[kinds.CONTROLNET]).unary_unary(_path("OpenLink"))
        try:
            ask(raw[0], timeout=ANSWER_S)
        except grpc.RpcError as error:
            lonely = error.code() is grpc.StatusCode.UNAVAILABLE and "has no peer" in (error.details() or "")
            if not lonely:
                raise
        return _FINE

    def _run_attempt(self, raw: tuple[bytes, ...]) -> Outcome:
        """Nothing is said before the engine begins, which may be late: so it is cancelled until it was there."""
        call = self._stream("RunAttempt", raw[0])
        cancel = _cancel_of(raw[0])
        try:
            # Read meanwhile: a call is not done before its last word has been heard. The gateway, too, may have
            # ended it by now: to it such an attempt is none of its own.
            reading = self._reader.submit(lambda: [*call])
            while cancel and not reading.done():
                if worker_pb2.CancelAttemptResponse.FromString(self._unary("CancelAttempt", cancel)).known:
                    break
            said = [worker_pb2.RunAttemptResponse.FromString(response) for response in reading.result(ANSWER_S)]
        finally:
            call.cancel()
        failed = [event.failed for event in said if event.HasField("failed")]
        return _outcome_of(failed[0]) if failed else _FINE

    def _cancel(self, job_id: str) -> None:
        self._unary("CancelJob", image_pb2.CancelJobRequest(job_id=job_id).SerializeToString())

    def _unary(self, method: str, raw: bytes) -> bytes:
        ask: Any = self._channel(method).unary_unary(_path(method))
        answer: bytes = ask(raw, timeout=ANSWER_S)
        return answer

    def _stream(self, method: str, raw: bytes, timeout_s: float = ANSWER_S) -> Any:
        ask: Any = self._channel(method).unary_stream(_path(method))
        return ask(raw, timeout=timeout_s)

    def _channel(self, method: str) -> grpc.Channel:
        return self.channels[SERVICES[method].rpartition(".")[2]]


@contextlib.contextmanager
def calling(gateway: Service, worker: Service, nets: Service, store: Service, *others: Service) -> Iterator[Caller]:
    """Calls them over channels of its own. others: a cache, and an activation store."""
    cache, activations = others
    addresses = {
        "ImageService": gateway.address,
        "FleetService": gateway.fleet,
        "WebhookService": gateway.fleet,
        "WorkerService": worker.address,
        "TemplateService": worker.address,
        "ControlNetService": nets.address,
        "LoraService": store.address,
        "CacheService": cache.address,
        "ActivationService": activations.address,
    }
    options = channel_options(MESSAGE_MIB)
    with contextlib.ExitStack() as stack:
        caller = Caller(
            {
                name: stack.enter_context(grpc.insecure_channel(address, options=options))
                for name, address in addresses.items()
            }
        )
        stack.callback(caller.close)
        yield caller


def _path(method: str) -> str:
    return f"/{SERVICES[method]}/{method}"


def _link_kind(raw: bytes) -> str:
    """Of the service that these bytes are for; "" where they are for none."""
    try:
        return link_pb2.OpenLinkRequest.FromString(raw).kind
    except DecodeError:
        return ""


def _cancel_of(raw: bytes) -> bytes | None:
    """What cancels the attempt that these bytes order; None where they order none."""
    try:
        attempt = worker_pb2.RunAttemptRequest.FromString(raw).attempt
    except DecodeError:
        return None
    if not 0 < len(attempt.job_id) <= 128 or attempt.number < 1:
        return None
    return worker_pb2.CancelAttemptRequest(attempt=attempt).SerializeToString()


def _is_watch(raw: bytes) -> bool:
    try:
        worker_pb2.WatchCheckpointsRequest.FromString(raw)
    except DecodeError:
        return False
    return True


def _refused(failure: grpc.RpcError) -> Outcome:
    error = from_rpc_error(failure)
    fields = frozenset(violation.field for violation in error.violations)
    # What came on the wire, which is more than what we make of it where no service of ours has said it.
    text = "\n".join([*_words(error.message, error), failure.details() or ""])
    return Outcome(code=failure.code(), text=text, fields=fields)


def _outcome_of(failed: Any) -> Outcome:
    """Of an attempt that was accepted and then failed; that it was cancelled is what we did.

    On a busy machine one finds out before that nobody has its ControlNets, which is no fault of its order.
    """
    code = next(code for code in grpc.StatusCode if code.value[0] == failed.code)
    if code in {grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED}:
        return _FINE
    if failed.reason == ERROR_REASON_NO_CONTROLNET:
        return Outcome(code=grpc.StatusCode.OK, text=str(failed))
    fields = frozenset(violation.field for violation in failed.violations)
    return Outcome(code=code, text=str(failed), fields=fields)


def _words(message: str, error: Any) -> Iterator[str]:
    yield message
    yield from (f"{name}: {value}" for name, value in error.metadata.items())
    yield from (f"{violation.field}: {violation.description}" for violation in error.violations)
