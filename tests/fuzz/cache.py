"""What an approximate cache is asked: valid requests of its methods, and their fixed corpus, every field at its limits
and one past.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.message import Message

from bottega.v1 import cache_pb2 as pb
from tests.fuzz.case import INF, INVALID, NAN, NOT_FOUND, OK, Case, case_of, shown

ENTRY = "0f" * 16
"""One that nobody has."""

MODEL_HASH = "ab" * 32
WORDS = (ENTRY, MODEL_HASH)
"""Texts that mean something to the cache."""

_FRACTIONS = (0.1, 0.2, 0.3, 0.4, 0.5)
_BAD_HASHES = ("x", "AB" * 32, "a" * 129, "../up", "\0", "a" * (1 << 20))
_BAD_ENTRIES = ("", "@", "@10", ENTRY[1:], f"0{ENTRY}", ENTRY.upper(), "../../etc/passwd", "\0", "x" * (1 << 20))


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
    yield case_of("GetCacheStats", "the only one", pb.GetCacheStatsRequest())
    yield case_of("ListCacheProfiles", "the only one", pb.ListCacheProfilesRequest())
    for entry in (ENTRY, f"{ENTRY}@10", f"{ENTRY}@", f"{ENTRY}@\0"):
        yield case_of("GetCacheEntry", f"entry {shown(entry)}", pb.GetCacheEntryRequest(entry=entry), NOT_FOUND)
    for entry in _BAD_ENTRIES:
        wrong = pb.GetCacheEntryRequest(entry=entry)
        yield case_of("GetCacheEntry", f"entry {shown(entry)}", wrong, INVALID, "entry")
    yield from _models()
    for limit in (0, 1, 500):
        yield case_of("ListCacheEntries", f"limit {limit}", pb.ListCacheEntriesRequest(limit=limit))
    for limit in (-1, 501, 2**31 - 1, -(2**31)):
        many = pb.ListCacheEntriesRequest(limit=limit)
        yield case_of("ListCacheEntries", f"limit {limit}", many, INVALID, "limit")
    yield from _profiles()


def _models() -> Iterator[Case]:
    for method in ("ListCacheEntries", "ClearCache"):
        request: Any = getattr(pb, f"{method}Request")
        for model_hash in ("", "a", "a" * 128):
            yield case_of(method, f"model {shown(model_hash)}", request(model_hash=model_hash))
        for model_hash in _BAD_HASHES:
            yield case_of(method, f"model {shown(model_hash)}", request(model_hash=model_hash), INVALID, "model_hash")


def _profiles() -> Iterator[Case]:
    yield _set("one with everything", balanced=_classes(), fast=_classes(), about="x" * 1000)
    yield _set("sixteen lengths", fast=[pb.CacheLengthClass(max_words=words) for words in range(1, 17)])
    yield _set("the longest prompt", balanced=[pb.CacheLengthClass(max_words=16 << 10)])
    for model_hash in ("", *_BAD_HASHES):
        yield _set(f"model {shown(model_hash)}", "model_hash", model_hash=model_hash)
    yield _set("about of 1001", "about", about="x" * 1001)
    for field in ("balanced", "fast"):
        yield from _lengths(field)
        yield from _thresholds(field)
    yield _set("none", model_hash=MODEL_HASH)


def _lengths(field: str) -> Iterator[Case]:
    many = [pb.CacheLengthClass(max_words=words) for words in range(1, 18)]
    yield _set(f"{field}: seventeen lengths", field, **{field: many})
    for words in (-1, (16 << 10) + 1, 2**31 - 1, -(2**31)):
        wrong = [pb.CacheLengthClass(max_words=words)]
        yield _set(f"{field}: {words} words", f"{field}[0].max_words", **{field: wrong})
    for name, lengths, place in (("unbounded twice", (0, 0), 0), ("one twice", (9, 9), 1), ("descending", (9, 8), 1)):
        classes = [pb.CacheLengthClass(max_words=words) for words in lengths]
        yield _set(f"{field}: lengths {name}", f"{field}[{place}].max_words", **{field: classes})


def _thresholds(field: str) -> Iterator[Case]:
    place = f"{field}[0].thresholds"
    for similarity in (-1.0, 0.0, 1.0):
        yield _set(f"{field}: similarity {similarity}", **{field: [_threshold(0.5, similarity)]})
    for similarity in (-1.001, 1.001, NAN, INF, -INF):
        wrong = [_threshold(0.5, similarity)]
        yield _set(f"{field}: similarity {similarity}", f"{place}[0].similarity", **{field: wrong})
    for fraction in (0.0, -0.1, 0.05, 0.6, 1.0, NAN, INF):
        wrong = [_threshold(fraction, 0.9)]
        yield _set(f"{field}: fraction {fraction}", f"{place}[0].fraction", **{field: wrong})
    descending = [pb.CacheLengthClass(thresholds=[_at(0.5), _at(0.1)])]
    yield _set(f"{field}: fractions that descend", f"{place}[1].fraction", **{field: descending})
    six = [pb.CacheLengthClass(thresholds=[_at(fraction) for fraction in (*_FRACTIONS, 0.5)])]
    yield _set(f"{field}: six fractions", place, **{field: six})


def _set(name: str, *fields: str, **facts: Any) -> Case:
    named = (f"profile.{field}" for field in fields)
    return case_of("SetCacheProfile", name, _profiled(**facts), INVALID if fields else OK, *named)


def _profiled(**facts: Any) -> pb.SetCacheProfileRequest:
    return pb.SetCacheProfileRequest(profile=pb.CacheProfile(**{"model_hash": MODEL_HASH, **facts}))


def _classes() -> list[pb.CacheLengthClass]:
    each = [_at(fraction) for fraction in _FRACTIONS]
    return [pb.CacheLengthClass(max_words=15, thresholds=each), pb.CacheLengthClass(thresholds=each[:1])]


def _threshold(fraction: float, similarity: float) -> pb.CacheLengthClass:
    return pb.CacheLengthClass(thresholds=[pb.CacheThreshold(fraction=fraction, similarity=similarity)])


def _at(fraction: float) -> pb.CacheThreshold:
    return pb.CacheThreshold(fraction=fraction, similarity=0.9)
