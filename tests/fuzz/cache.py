"""What an approximate cache is asked: valid requests of its methods, and their fixed corpus, every field at its limits
and one past.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import grpc
from google.protobuf.message import Message

from bottega.v1 import cache_pb2 as pb
from tests.fuzz.case import (
    INF,
    INVALID,
    LEAST_INT32,
    MIB_TEXT,
    MOST_INT32,
    NAN,
    NOT_FOUND,
    OK,
    Case,
    asking,
    case_of,
    limits,
    shown,
)

ENTRY = "0f" * 16
"""One that nobody has."""

MODEL_HASH = "ab" * 32
WORDS = (ENTRY, MODEL_HASH)
"""Texts that mean something to the cache."""

_FRACTIONS = (0.1, 0.2, 0.3, 0.4, 0.5)
_BAD_HASHES = ("x", "AB" * 32, "a" * 129, "../up", "\0", "a" * (1 << 20))
_BAD_ENTRIES = ("", "@", "@10", ENTRY[1:], f"0{ENTRY}", ENTRY.upper(), "../../etc/passwd", "\0", MIB_TEXT)


def valid(method: str, entry: str) -> list[Message]:
    """Requests that are taken. entry: one that is there."""
    match method:
        case "GetCacheEntry":
            return [pb.GetCacheEntryRequest(entry=entry), pb.GetCacheEntryRequest(entry=f"{entry}@10")]
        case "ListCacheEntries":
            return [pb.ListCacheEntriesRequest(), pb.ListCacheEntriesRequest(model_hash=MODEL_HASH, limit=9)]
        case "ClearCache":
            return [pb.ClearCacheRequest(), pb.ClearCacheRequest(model_hash=MODEL_HASH)]
        case "SetCacheProfile":
            return [_profiled(balanced=_classes(), fast=_classes(), about="measured"), _profiled()]
        case _:
            return [getattr(pb, f"{method}Request")()]


def cache_corpus() -> Iterator[Case]:
    """Yield all of it."""
    yield case_of("GetCacheStats", "the only one", pb.GetCacheStatsRequest())
    yield case_of("ListCacheProfiles", "the only one", pb.ListCacheProfilesRequest())
    for entry in (ENTRY, f"{ENTRY}@10", f"{ENTRY}@", f"{ENTRY}@\0"):
        yield case_of("GetCacheEntry", f"entry {shown(entry)}", pb.GetCacheEntryRequest(entry=entry), NOT_FOUND)
    yield from limits(asking("GetCacheEntry", pb.GetCacheEntryRequest), "entry", (), _BAD_ENTRIES)
    listed = asking("ListCacheEntries", pb.ListCacheEntriesRequest)
    for case in (listed, asking("ClearCache", pb.ClearCacheRequest)):
        yield from limits(case, "model_hash", ("", "a", "a" * 128), _BAD_HASHES)
    yield from limits(listed, "limit", (0, 1, 500), (-1, 501, MOST_INT32, LEAST_INT32))
    yield from _profiles()


def _profiles() -> Iterator[Case]:
    yield _set("one with everything", balanced=_classes(), fast=_classes(), about="x" * 1000)
    yield _set("sixteen lengths", fast=[pb.CacheLengthClass(max_words=words) for words in range(1, 17)])
    yield _set("the longest prompt", balanced=[pb.CacheLengthClass(max_words=16 << 10)])
    yield from limits(_set, "model_hash", (MODEL_HASH,), ("", *_BAD_HASHES), within="profile.")
    yield from limits(_set, "about", (), ("x" * 1001,), within="profile.")
    for field in ("balanced", "fast"):
        yield from _lengths(field)
        yield from _thresholds(field)


def _lengths(field: str) -> Iterator[Case]:
    def case(words: Sequence[int], place: str) -> Case:
        classes = [pb.CacheLengthClass(max_words=each) for each in words]
        return _set(f"{field}: lengths {words}", INVALID, f"profile.{field}{place}", **{field: classes})

    yield case(range(1, 18), "")
    for words in (-1, (16 << 10) + 1, MOST_INT32, LEAST_INT32):
        yield case([words], "[0].max_words")
    for lengths, place in (((0, 0), 0), ((9, 9), 1), ((9, 8), 1)):
        yield case(lengths, f"[{place}].max_words")


def _thresholds(field: str) -> Iterator[Case]:
    def case(name: str, place: str | None, *thresholds: tuple[float, float]) -> Case:
        made = [pb.CacheThreshold(fraction=fraction, similarity=similarity) for fraction, similarity in thresholds]
        named = () if place is None else (INVALID, f"profile.{field}[0].thresholds{place}")
        return _set(f"{field}: {name}", *named, **{field: [pb.CacheLengthClass(thresholds=made)]})

    for similarity in (-1.0, 0.0, 1.0):
        yield case(f"similarity {similarity}", None, (0.5, similarity))
    for similarity in (-1.001, 1.001, NAN, INF, -INF):
        yield case(f"similarity {similarity}", "[0].similarity", (0.5, similarity))
    for fraction in (0.0, -0.1, 0.05, 0.6, 1.0, NAN, INF):
        yield case(f"fraction {fraction}", "[0].fraction", (fraction, 0.9))
    yield case("fractions that descend", "[1].fraction", (0.5, 0.9), (0.1, 0.9))
    yield case("six fractions", "", *((fraction, 0.9) for fraction in (*_FRACTIONS, 0.5)))


def _set(name: str, code: grpc.StatusCode = OK, /, *fields: str, **facts: Any) -> Case:
    return case_of("SetCacheProfile", name, _profiled(**facts), code, *fields)


def _profiled(**facts: Any) -> pb.SetCacheProfileRequest:
    return pb.SetCacheProfileRequest(profile=pb.CacheProfile(**{"model_hash": MODEL_HASH, **facts}))


def _classes() -> list[pb.CacheLengthClass]:
    each = [pb.CacheThreshold(fraction=fraction, similarity=0.9) for fraction in _FRACTIONS]
    return [pb.CacheLengthClass(max_words=15, thresholds=each), pb.CacheLengthClass(thresholds=each[:1])]
