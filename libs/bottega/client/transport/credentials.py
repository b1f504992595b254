"""Credentials of a client, and limits on the responses of servers, which may be malicious.

An empty message in a list takes two bytes on the wire and a hundred in memory, so a response of valid size could take a
gigabyte. A response with too many fields, or one that cannot be parsed, raises an error when it is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeVar, cast

import grpc
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from bottega.errors import ConfigError, InternalError, InvalidRequest, TooLarge, Violation
from bottega.rpc.channel import MAX_MESSAGE_MIB, ApiKey, Channels, Target
from bottega.rpc.interceptor.message_limits import has_unknown_fields
from bottega.rpc.security.api_keys import parse_key
from bottega.rpc.security.tls import AuthorityFile, TlsConfig, TlsFiles

AnswerT = TypeVar("AnswerT")

# In the order of Tls's fields.
VARIABLES = ("BOTTEGA_TLS_AUTHORITY", "BOTTEGA_TLS_CERTIFICATE", "BOTTEGA_TLS_KEY")

# Twice the fields of a fleet of 256 services that each host hundreds of LoRAs.
MAX_FIELDS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Paths of the PEM files that `bottega certs` makes for a client."""

    authority: str | Path
    """File of the certificate authority that must have signed the gateway's certificate."""
    certificate: str | Path | None = None
    """File of the client's certificate; None if the client has an API key instead."""
    key: str | Path | None = None
    """File of the certificate's private key."""


def tls_from_environment() -> Tls | None:
    """Return the files that BOTTEGA_TLS_AUTHORITY, _CERTIFICATE and _KEY name; None if none of them is set."""
    authority, certificate, key = (os.environ.get(name, "").strip() for name in VARIABLES)
    if not (authority or certificate or key):
        return None
    if not authority:
        raise _refusal(f"{VARIABLES[0]} is not set, and TLS needs an authority to trust")
    return Tls(authority=authority, certificate=certificate or None, key=key or None)


def channels_of(tls: Tls | None) -> Channels:
    """Return the channel factory of a client. Raise InvalidRequest if the files of `tls` cannot be used."""
    if tls is None:
        return BoundedChannels()
    if (tls.certificate is None) != (tls.key is None):
        raise _refusal("a certificate needs its key, and a key its certificate")
    try:
        if tls.certificate is None:
            return BoundedChannels(AuthorityFile(Path(tls.authority)))
        files = TlsConfig(certificate=str(tls.certificate), key=str(tls.key), authority=str(tls.authority))
        return BoundedChannels(TlsFiles(files))
    except ConfigError as error:
        raise _refusal(error.message) from None


def _refusal(rule: str) -> InvalidRequest:
    return InvalidRequest(f"tls: {rule}", violations=[Violation(field="tls", description=rule)])


KEY_VARIABLE = "BOTTEGA_API_KEY"


def default_key() -> str:
    """Return the API key in $BOTTEGA_API_KEY; empty if it is not set."""
    return os.environ.get(KEY_VARIABLE, "").strip()


def checked_key(key: ApiKey) -> ApiKey:
    """Return a valid key unchanged; "" means no key. Raise InvalidRequest for an invalid one, without showing it."""
    if isinstance(key, str) and key and parse_key(key) is None:
        rule = "must be btg_, 16 hexadecimal digits, _ and 64 more, as `bottega tenants add` shows it once"
        raise InvalidRequest(f"api_key: {rule}", violations=[Violation(field="api_key", description=rule)])
    return key


class BoundedChannels(Channels):
    """A channel factory of clients whose responses have at most `MAX_FIELDS` fields."""

    def open(self, target: Target, *, max_message_mib: int = MAX_MESSAGE_MIB, api_key: ApiKey = "") -> grpc.aio.Channel:
        """Return a channel; see Channels.open."""
        channel = super().open(target, max_message_mib=max_message_mib, api_key=api_key)
        return cast("grpc.aio.Channel", _BoundedChannel(channel))


class _BoundedChannel:
    """A channel that counts the fields of responses before they are parsed."""

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
        """Return an attribute of the channel. Methods that make calls get a parser that counts fields first."""
        found = getattr(self._channel, name)
        if name not in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            return found

        def make_call(method: str, *args: Any, response_deserializer: Any = None, **kwargs: Any) -> Any:
            return found(method, *args, response_deserializer=_bounded(response_deserializer, method), **kwargs)

        return make_call


class _Unreadable:
    """A placeholder for a response that cannot be parsed. It raises an error on every access.

    A parser cannot raise it itself: gRPC logs its errors and returns None.
    """

    def __init__(self, error: InternalError) -> None:
        self.error = error

    def __getattr__(self, name: str) -> NoReturn:
        raise self.error


def readable(answer: AnswerT) -> AnswerT:
    """Return a response unchanged. Raise InternalError if it could not be parsed."""
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
            why = f"has more than {MAX_FIELDS:,} fields, or is nested too deeply"
        except DecodeError:
            why = "cannot be read"
        return _Unreadable(InternalError(f"the server's answer to {method.rpartition('/')[2]} {why}"))

    return parse_bounded
