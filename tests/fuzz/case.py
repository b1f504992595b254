"""One request of the fixed corpus, and the answer that it must get. Sends nothing."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from google.protobuf.message import Message

OK = grpc.StatusCode.OK
INVALID = grpc.StatusCode.INVALID_ARGUMENT
ALREADY_EXISTS = grpc.StatusCode.ALREADY_EXISTS
NOT_FOUND = grpc.StatusCode.NOT_FOUND
UNSERVED = grpc.StatusCode.UNIMPLEMENTED
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE

NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call of a method, by its name in the contract.

    raw: the messages of the caller, one but for Join.
    fields: all that are named as wrong, in any order.
    """

    method: str
    name: str
    raw: tuple[bytes, ...]
    code: grpc.StatusCode
    fields: frozenset[str] = frozenset()


def case_of(method: str, name: str, request: Message, code: grpc.StatusCode = OK, *fields: str) -> Case:
    """A case with one message."""
    return Case(method=method, name=name, raw=(request.SerializeToString(),), code=code, fields=frozenset(fields))


def shown(value: object) -> str:
    """Short enough for the name of a case."""
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:16]}... ({len(str(value))})"
