"""What an activation store is asked: valid requests of its methods, and their fixed corpus, every field at its limits
and one past.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.message import Message

from bottega import rules
from bottega.v1 import activations_pb2 as pb
from tests.fuzz.case import (
    INF,
    INVALID,
    LEAST_INT32,
    MIB_TEXT,
    MOST_INT32,
    NAN,
    OK,
    Case,
    asking,
    case_of,
    limits,
    shown,
)

TEMPLATE = "0f" * 16
"""One that nobody has."""

MODEL_HASH = "ab" * 32
SOURCE = "5e" * 32
WORDS = (TEMPLATE, MODEL_HASH, SOURCE)
"""Texts that mean something to the store."""

_NO_SECONDS = (-0.001, NAN, INF, -INF)
_GOOD_IDS = ("01234567", TEMPLATE)
_BAD_IDS = ("0123456", f"{TEMPLATE}0", "ABCDEFAB", "../../../x", "\0", "0" * (1 << 20))
_BAD_HASHES = ("", "x", "AB" * 32, "a" * 129, "../up", "\0", "a" * (1 << 20))
_BAD_SOURCES = ("", "5E" * 32, SOURCE[1:], f"{SOURCE}0", "\0", MIB_TEXT)


def valid(method: str, template: str) -> list[Message]:
    """Requests that are taken. template: one that is there."""
    match method:
        case "ListStoredTemplates":
            return [pb.ListStoredTemplatesRequest(), pb.ListStoredTemplatesRequest(limit=9)]
        case "DropStoredTemplate" | "WarmTemplate":
            request: Any = getattr(pb, f"{method}Request")
            return [request(id=template), request(id=template[:8]), request()]
        case "PinTemplate":
            return [pb.PinTemplateRequest(id=template, pinned=pinned) for pinned in (True, False)]
        case "PrefetchTemplates":
            return [pb.PrefetchTemplatesRequest(), pb.PrefetchTemplatesRequest(sources=[SOURCE, "0" * 64])]
        case "SetBlockProfile":
            return [_profiled(), _profiled(shares=(), blocks=[])]
        case _:
            return [getattr(pb, f"{method}Request")()]


def activation_corpus() -> Iterator[Case]:
    """Yield all of it."""
    yield case_of("ListBlockProfiles", "the only one", pb.ListBlockProfilesRequest())
    listed = asking("ListStoredTemplates", pb.ListStoredTemplatesRequest)
    yield from limits(listed, "limit", (0, 1, 1000), (-1, 1001, MOST_INT32, LEAST_INT32))
    for method in ("DropStoredTemplate", "WarmTemplate"):
        case = asking(method, getattr(pb, f"{method}Request"))
        yield from limits(case, "id", ("", *_GOOD_IDS), _BAD_IDS)
    yield from limits(asking("PinTemplate", pb.PinTemplateRequest, pinned=True), "id", _GOOD_IDS, ("", *_BAD_IDS))
    yield from _sources()
    yield from _profiles()


def _sources() -> Iterator[Case]:
    case = asking("PrefetchTemplates", pb.PrefetchTemplatesRequest)
    yield from limits(case, "sources", [[SOURCE] * count for count in (0, 1, 64)], ([SOURCE] * 65,))
    yield case("64 stores", sources=[SOURCE], stores=["s"] * 64)
    yield case("65 stores", INVALID, "stores", stores=["s"] * 65)
    for source in _BAD_SOURCES:
        yield case(f"source {shown(source)}", INVALID, "sources[1]", sources=[SOURCE, source])


def _profiles() -> Iterator[Case]:
    eight = [share / 8 for share in range(1, 9)]
    yield _set("one without blocks", blocks=[])
    yield _set("eight shares", shares=eight, blocks=[_block(masked_s=[0.1] * 8)])
    yield _set("as many blocks as may be", blocks=[_block(name=f"b{number}") for number in range(4096)])
    yield _set("one block too many", INVALID, "profile.blocks", blocks=[_block()] * 4097)
    yield _set("two blocks of one name", INVALID, "profile.blocks", blocks=[_block()] * 2)
    nine = [share / 9 for share in range(1, 10)]
    yield _set("nine shares", INVALID, "profile.shares", shares=nine, blocks=[_block(masked_s=nine)])
    dtypes = ("", "int8", "FLOAT16", "\0", MIB_TEXT)
    shares = ((0.0, 0.5), (0.5, 0.5), (0.5, 0.2), (0.5, 1.001), (NAN, 0.5), (0.5, INF), (-0.1, 0.5))
    for field, bad in (("model_hash", _BAD_HASHES), ("dtype", dtypes), ("shares", shares), ("forward_s", _NO_SECONDS)):
        yield from limits(_set, field, (), bad, within="profile.")
    yield from limits(_set, "about", ("x" * 1000,), ("x" * 1001,), within="profile.")
    for field in ("width", "height"):
        no_sides = (0, -1, rules.MAX_SIDE + 1, MOST_INT32, LEAST_INT32)
        yield from limits(_set, field, (1, rules.MAX_SIDE), no_sides, within="profile.")
    yield from _blocks()


def _blocks() -> Iterator[Case]:
    def case(name: str, code: grpc.StatusCode = OK, /, *fields: str, **facts: Any) -> Case:
        return _set(f"a block's {name}", code, *fields, blocks=[_block(**facts)])

    bad_names = ("", "x" * 201, "é" * 101, "a\nb", "\0", MIB_TEXT)
    within = "profile.blocks[0]."
    yield from limits(case, "name", ("x", "x" * 200, "é" * 100), bad_names, within=within)
    yield from limits(case, "size_bytes", (0, 2**63 - 1), (-1, -(2**63)), within=within)
    yield from limits(case, "full_s", (), _NO_SECONDS, within=within)
    yield from limits(case, "masked_s", (), ((), (0.1,), (0.1,) * 3), within=within)
    for seconds in _NO_SECONDS:
        yield case(f"masked_s {seconds}", INVALID, f"{within}masked_s[1]", masked_s=(0.1, seconds))


def _set(name: str, code: grpc.StatusCode = OK, /, *fields: str, **facts: Any) -> Case:
    return case_of("SetBlockProfile", name, _profiled(**facts), code, *fields)


def _profiled(**facts: Any) -> pb.SetBlockProfileRequest:
    said: dict[str, Any] = {"model_hash": MODEL_HASH, "dtype": "float32", "width": 64, "height": 64, "forward_s": 0.1}
    said |= {"shares": (0.05, 0.2), "blocks": [_block()], "about": "measured"}
    return pb.SetBlockProfileRequest(profile=pb.BlockProfile(**{**said, **facts}))


def _block(**facts: Any) -> pb.BlockCost:
    said = {"name": "mid_block.attentions.0", "size_bytes": 4096, "full_s": 0.01, "masked_s": (0.001, 0.002)}
    return pb.BlockCost(**{**said, **facts})
