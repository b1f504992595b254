"""The fixed corpus leaves no field of any request out: each is set, and each with a bound stands on both sides of it.

Reads the contract's descriptors and the cases; starts nothing.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from bottega import v1
from tests.fuzz.calls import SERVICES
from tests.fuzz.cases import TOO_LARGE_BYTES, corpus

_FILES = [
    importlib.import_module(f"{v1.__name__}.{module.name}")
    for module in pkgutil.iter_modules(v1.__path__)
    if module.name.endswith("_pb2")
]
REQUESTS: Mapping[str, Descriptor] = {
    method.name: method.input_type
    for file in _FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
_REFUSED = frozenset({grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED})

# Fields that have no value which is refused for its own sake, and why.
UNBOUNDED = {
    "GetImage job_id": "one that nobody has is NOT_FOUND",
    "GetJob job_id": "as above",
    "GetJobTrace job_id": "as above",
    "WatchJob job_id": "as above",
    "CancelJob job_id": "as above",
    "DeleteJob job_id": "as above",
    "GetImage index": "as above",
    "SetProfile digest": "as above",
    "SetLoraProfile digest": "as above",
    "Generate spec.controlnets.control_guidance_end": "named by its start",
    "SubmitJob spec.controlnets.control_guidance_end": "as above",
    "RunAttempt spec.controlnets.control_guidance_end": "as above",
    "RunAttempt checkpoint": "one that fits nothing is ignored; the message bounds it",
    "Join registration.models.workers": "the gateway counts them itself",
    "Join load.running.attempt.number": "not used",
    "Join load.running.attempt.generation": "as above",
    "Join load.running.steps_left": "nonsense is not used",
    "Join load.step_times.latent_height": "as above",
    "Join load.step_times.latent_width": "as above",
    "Join load.step_times.rows": "as above",
    "Join load.step_times.seconds": "as above",
}
# Fields with no value that the corpus could know to be taken, and why.
UNKNOWABLE = {
    "Generate spec.max_sequence_length": "the embedded model has no T5, and refuses it",
    "SubmitJob spec.max_sequence_length": "as above",
    "ListJobs page_token": "it is made by the page before",
    "RunAttempt spec.techniques.recording": "the gateway refuses every request that has it",
}


@dataclass(slots=True)
class _Seen:
    """Paths of fields of one method's request: in any case, in one that is taken, in one that is refused for them."""

    anywhere: set[str] = field(default_factory=set)
    taken: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)


@functools.cache
def _seen() -> Mapping[str, _Seen]:
    found: defaultdict[str, _Seen] = defaultdict(_Seen)
    for case in corpus("job", "ab" * 32, "cd" * 32):
        seen = found[case.method]
        named = {re.sub(r"\[\d+\]", "", name) for name in case.fields}
        if case.method == "UploadLora":  # names what is in its head as RegisterLora does
            named |= {f"head.{name}" for name in named}
        there = {path for raw in case.raw for path in _paths_in(REQUESTS[case.method], raw)}
        seen.anywhere |= there
        if case.code not in _REFUSED:
            seen.taken |= there
        seen.refused |= {path for path in there if any(f"{path}.".startswith(f"{name}.") for name in named)}
    return found


def _paths_in(kind: Descriptor, raw: bytes) -> Iterator[str]:
    """Of the fields that are set in a message; none of what is no message."""
    if len(raw) >= TOO_LARGE_BYTES:
        return
    try:
        yield from _set_in(GetMessageClass(kind).FromString(raw))
    except DecodeError:
        return


def _set_in(message: Message, above: str = "") -> Iterator[str]:
    for known, value in message.ListFields():
        yield above + known.name
        if _inner(known) is not None:
            for inner in value if known.is_repeated else (value,):
                yield from _set_in(inner, f"{above}{known.name}.")


def _fields(kind: Descriptor, above: str = "") -> Iterator[tuple[str, Any]]:
    """Path and descriptor of every field of a message, and of those in it."""
    for known in kind.fields:
        yield above + known.name, known
        if (inner := _inner(known)) is not None:
            yield from _fields(inner, f"{above}{known.name}.")


def _inner(known: Any) -> Descriptor | None:
    """The message that a field's values are; None for plain values and maps."""
    kind: Descriptor | None = known.message_type
    return None if kind is None or kind.GetOptions().map_entry else kind


def _valued() -> set[str]:
    """Methods, and paths of what may be too much or too little: numbers, texts and everything repeated."""
    return {
        f"{method} {path}"
        for method, kind in REQUESTS.items()
        for path, known in _fields(kind)
        if known.is_repeated or (known.message_type is None and known.cpp_type != FieldDescriptor.CPPTYPE_BOOL)
    }


def _named(where: str) -> set[str]:
    """Methods and paths that were seen there."""
    return {f"{method} {path}" for method, seen in _seen().items() for path in getattr(seen, where)}


def test_every_method_of_the_contract_is_called() -> None:
    assert REQUESTS.keys() == SERVICES.keys() == _seen().keys()


def test_every_field_is_set_by_some_case() -> None:
    paths = {f"{method} {path}" for method, kind in REQUESTS.items() for path, _ in _fields(kind)}
    assert paths - _named("anywhere") == set()


def test_every_field_has_a_value_that_is_taken() -> None:
    assert _valued() - _named("taken") == UNKNOWABLE.keys()


def test_every_field_with_a_bound_has_a_value_that_is_refused() -> None:
    assert _valued() - _named("refused") - UNBOUNDED.keys() == set()


def test_what_is_left_out_is_a_field_that_there_is() -> None:
    assert {*UNBOUNDED, *UNKNOWABLE} - _valued() == set()
