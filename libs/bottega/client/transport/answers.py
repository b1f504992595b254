"""Answers of servers, which a client need not trust: bounded before anything is made of them.

Two bytes of an empty message in a list become a hundred, so that an answer within the bounds of a message could take a
gigabyte. One with more fields than any fleet has, or that is no message, raises where somebody looks into it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn, TypeVar, cast

import grpc
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from bottega.errors import InternalError, TooLarge
from bottega.rpc.channel import MAX_MESSAGE_MIB, Channels, Target
from bottega.rpc.interceptor.message_limits import has_unknown_fields

AnswerT = TypeVar("AnswerT")

# A fleet of 256 services that host hundreds of LoRAs each has half as many.
MAX_FIELDS = 1 << 20


class BoundedChannels(Channels):
    """Opens channels of a client, by which no answer takes more memory than `MAX_FIELDS` fields and its bytes."""

    def open(self, target: Target, *, max_message_mib: int = MAX_MESSAGE_MIB, api_key: str = "") -> grpc.aio.Channel:
        """Return a channel; see Channels.open."""
        channel = super().open(target, max_message_mib=max_message_mib, api_key=api_key)
        return cast("grpc.aio.Channel", _BoundedChannel(channel))


class _BoundedChannel:
    """A channel whose answers are looked at before they are parsed."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    async def __aenter__(self) -> _BoundedChannel:
        await self._channel.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._channel.__aexit__(kind, error, at)

    def __getattr__(self, name: str) -> Any:
        """Return what the channel has; its makers of calls get a parser that looks first."""
        found = getattr(self._channel, name)
        if name not in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            return found

        def make_call(method: str, *args: Any, response_deserializer: Any = None, **kwargs: Any) -> Any:
            return found(method, *args, response_deserializer=_bounded(response_deserializer, method), **kwargs)

        return make_call


class _Unreadable:
    """Stands for an answer that cannot be read: whoever looks into it gets the error.

    gRPC logs what a parser raises, and gives out None.
    """

    def __init__(self, error: InternalError) -> None:
        self.error = error

    def __getattr__(self, name: str) -> NoReturn:
        raise self.error


def readable(answer: AnswerT) -> AnswerT:
    """Return an answer. Raises InternalError where it is one that cannot be read."""
    if isinstance(answer, _Unreadable):
        raise answer.error
    return answer


def _bounded(parse: Callable[[bytes], Any] | None, method: str) -> Callable[[bytes], Any] | None:
    descriptor: Descriptor | None = getattr(getattr(parse, "__self__", None), "DESCRIPTOR", None)
    if parse is None or descriptor is None:
        return parse

    def parse_bounded(raw: bytes) -> Any:
        try:
            has_unknown_fields(raw, descriptor, max_fields=MAX_FIELDS)
            return parse(raw)
        except TooLarge:
            why = f"has more than {MAX_FIELDS:,} fields, or nests deeper than any answer of Bottega"
        except DecodeError:
            why = "cannot be read"
        return _Unreadable(InternalError(f"the server's answer to {method.rpartition('/')[2]} {why}"))

    return parse_bounded
