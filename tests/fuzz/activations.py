"""What an activation store is asked: valid requests of its methods, and their fixed corpus, every field at its limits
and one past.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.message import Message

from bottega import rules
from bottega.v1 import activations_pb2 as pb
from tests.fuzz.case import INF, INVALID, NAN, OK, Case, case_of, shown

TEMPLATE = "0f" * 16
"""One that nobody has."""

MODEL_HASH = "ab" * 32
SOURCE = "5e" * 32
WORDS = (TEMPLATE, MODEL_HASH, SOURCE)
"""Texts that mean something to the store."""

_GOOD_IDS = ("01234567", TEMPLATE)
_BAD_IDS = ("0123456", f"{TEMPLATE}0", "ABCDEFAB", "../../../x", "\0", "0" * (1 << 20))
_BAD_HASHES = ("", "x", "AB" * 32, "a" * 129, "../up", "\0", "a" * (1 << 20))
_BAD_SOURCES = ("", "5E" * 32, SOURCE[1:], f"{SOURCE}0", "\0", "x" * (1 << 20))


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
    yield case_of("ListBlockProfiles", "the only one", pb.ListBlockProfilesRequest())
    for limit in (0, 1, 1000):
        yield case_of("ListStoredTemplates", f"limit {limit}", pb.ListStoredTemplatesRequest(limit=limit))
    for limit in (-1, 1001, 2**31 - 1, -(2**31)):
        many = pb.ListStoredTemplatesRequest(limit=limit)
        yield case_of("ListStoredTemplates", f"limit {limit}", many, INVALID, "limit")
    yield from _ids()
    yield from _sources()
    yield from _profiles()


def _ids() -> Iterator[Case]:
    for method in ("DropStoredTemplate", "WarmTemplate", "PinTemplate"):
        request: Any = getattr(pb, f"{method}Request")
        said: dict[str, Any] = {"pinned": True} if method == "PinTemplate" else {}
        for template in _GOOD_IDS:
            yield case_of(method, f"template {shown(template)}", request(id=template, **said))
        for template in _BAD_IDS:
            yield case_of(method, f"template {shown(template)}", request(id=template, **said), INVALID, "id")
        if said:
            yield case_of(method, "no template", request(**said), INVALID, "id")
        else:
            yield case_of(method, "all of them", request())


def _sources() -> Iterator[Case]:
    request = pb.PrefetchTemplatesRequest
    for count in (0, 1, 64):
        yield case_of("PrefetchTemplates", f"{count} sources", request(sources=[SOURCE] * count))
    yield case_of("PrefetchTemplates", "64 stores", request(sources=[SOURCE], stores=["s"] * 64))
    yield case_of("PrefetchTemplates", "65 stores", request(stores=["s"] * 65), INVALID, "stores")
    yield case_of("PrefetchTemplates", "65 sources", request(sources=[SOURCE] * 65), INVALID, "sources")
    for source in _BAD_SOURCES:
        wrong = request(sources=[SOURCE, source])
        yield case_of("PrefetchTemplates", f"source {shown(source)}", wrong, INVALID, "sources[1]")


def _profiles() -> Iterator[Case]:
    yield _set("one with everything", about="x" * 1000)
    yield _set("one without blocks", blocks=[])
    yield _set("eight shares", shares=[share / 8 for share in range(1, 9)], blocks=[_block(masked_s=[0.1] * 8)])
    yield _set("as many blocks as may be", blocks=[_block(name=f"b{number}") for number in range(4096)])
    yield _set("one block too many", "blocks", blocks=[_block()] * 4097)
    for model_hash in _BAD_HASHES:
        yield _set(f"model {shown(model_hash)}", "model_hash", model_hash=model_hash)
    for dtype in ("", "int8", "FLOAT16", "\0", "x" * (1 << 20)):
        yield _set(f"dtype {shown(dtype)}", "dtype", dtype=dtype)
    for field in ("width", "height"):
        for side in (1, rules.MAX_SIDE):
            yield _set(f"{field} {side}", **{field: side})
        for side in (0, -1, rules.MAX_SIDE + 1, 2**31 - 1, -(2**31)):
            yield _set(f"{field} {side}", field, **{field: side})
    nine = [share / 9 for share in range(1, 10)]
    for shares in ((0.0, 0.5), (0.5, 0.5), (0.5, 0.2), (0.5, 1.001), (NAN, 0.5), (0.5, INF), (-0.1, 0.5)):
        yield _set(f"shares {shares}", "shares", shares=shares)
    yield _set("nine shares", "shares", shares=nine, blocks=[_block(masked_s=nine)])
    for seconds in (-0.001, NAN, INF, -INF):
        yield _set(f"a forward of {seconds} s", "forward_s", forward_s=seconds)
    yield _set("about of 1001", "about", about="x" * 1001)
    yield from _blocks()


def _blocks() -> Iterator[Case]:
    for name in ("x", "x" * 200, "é" * 100):
        yield _set(f"a block called {shown(name)}", blocks=[_block(name=name)])
    for name in ("", "x" * 201, "é" * 101, "a\nb", "\0", "x" * (1 << 20)):
        yield _set(f"a block called {shown(name)}", "blocks[0].name", blocks=[_block(name=name)])
    for size in (0, 2**63 - 1):
        yield _set(f"a block of {size} bytes", blocks=[_block(size_bytes=size)])
    for size in (-1, -(2**63)):
        yield _set(f"a block of {size} bytes", "blocks[0].size_bytes", blocks=[_block(size_bytes=size)])
    for seconds in (-0.001, NAN, INF, -INF):
        yield _set(f"a block of {seconds} s", "blocks[0].full_s", blocks=[_block(full_s=seconds)])
        wrong = _block(masked_s=(0.1, seconds))
        yield _set(f"a masked block of {seconds} s", "blocks[0].masked_s[1]", blocks=[wrong])
    for masked in ((), (0.1,), (0.1,) * 3):
        yield _set(f"{len(masked)} masked times", "blocks[0].masked_s", blocks=[_block(masked_s=masked)])


def _set(name: str, *fields: str, **facts: Any) -> Case:
    named = (f"profile.{field}" for field in fields)
    return case_of("SetBlockProfile", name, _profiled(**facts), INVALID if fields else OK, *named)


def _profiled(**facts: Any) -> pb.SetBlockProfileRequest:
    said: dict[str, Any] = {"model_hash": MODEL_HASH, "dtype": "float32", "width": 64, "height": 64, "forward_s": 0.1}
    said |= {"shares": (0.05, 0.2), "blocks": [_block()], "about": "measured"}
    return pb.SetBlockProfileRequest(profile=pb.BlockProfile(**{**said, **facts}))


def _block(**facts: Any) -> pb.BlockCost:
    said = {"name": "mid_block.attentions.0", "size_bytes": 4096, "full_s": 0.01, "masked_s": (0.001, 0.002)}
    return pb.BlockCost(**{**said, **facts})
