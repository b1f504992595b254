"""One request of the fixed corpus, and the answer that it must get."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import grpc
from google.protobuf.message import Message

OK = grpc.StatusCode.OK
INVALID = grpc.StatusCode.INVALID_ARGUMENT
ALREADY_EXISTS = grpc.StatusCode.ALREADY_EXISTS
NOT_FOUND = grpc.StatusCode.NOT_FOUND
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE

NAN, INF = float("nan"), float("inf")
LEAST_INT32, MOST_INT32 = -(2**31), 2**31 - 1
MIB_TEXT = "x" * (1 << 20)

# That name nothing, whatever it is of.
BAD_NAMES = ("", "x" * 201, "a b", "../up", "\0", "ü", "/etc", "@shop", "x@", "x@Shop", "x@a@b", f"{'x' * 196}@shop")
BAD_DIGESTS = ("", "A" * 64, "a" * 63, "a" * 65, "\0" * 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call of a method, by its name in the contract.

    raw: the messages of the caller, one but for Join.
    fields: all that are named as wrong, in any order. refused_later: of an attempt that the engine refuses, unless it
    is cancelled before: then `code` is what it gets. if_idle: a worker that still draws says UNAVAILABLE.
    """

    method: str
    name: str
    raw: tuple[bytes, ...]
    code: grpc.StatusCode
    fields: frozenset[str] = frozenset()
    refused_later: bool = False
    if_idle: bool = False


def case_of(method: str, name: str, request: Message, code: grpc.StatusCode = OK, *fields: str) -> Case:
    return Case(method=method, name=name, raw=(request.SerializeToString(),), code=code, fields=frozenset(fields))


def refused_load(case: Case, field: str) -> Case:
    """The case of a service that joins, with a report that is refused for this field."""
    return replace(case, code=INVALID, fields=frozenset({f"load.{field}"}))


def asking(method: str, request: Any, **facts: Any) -> Any:
    """Return what makes cases of a method, whose requests have these fields, or others in their place."""

    def case(name: str, code: grpc.StatusCode = OK, /, *fields: str, **own: Any) -> Case:
        return case_of(method, name, request(**{**facts, **own}), code, *fields)

    return case


def limits(
    case: Any, field: str, good: Iterable[Any], bad: Iterable[Any] = (), *, within: str = "", **facts: Any
) -> Iterator[Case]:
    """Yield cases with values of a field that are taken, and with some for which it is refused.

    Args:
        case: Makes them.
        within: What the field's name is told with in front.
        facts: Other fields.
    """
    for value in good:
        yield case(f"{field} {shown(value)}", **{**facts, field: value})
    for value in bad:
        yield case(f"{field} {shown(value)}", INVALID, f"{within}{field}", **{**facts, field: value})


def shown(value: object) -> str:
    """Short enough for the name of a case."""
    if isinstance(value, list) and len(value) > 4:
        return f"{len(value)} of {shown(value[0])}"
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:16]}... ({len(str(value))})"
