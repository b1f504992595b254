"""The fixed corpus of LinkService, which five kinds of services serve: every field at its limits and one past."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.message import Message

from bottega import kinds
from bottega.v1.link_pb2 import LinkTerm, OpenLinkRequest
from tests.fuzz.case import INVALID, Case, case_of, shown

KINDS = (kinds.ACTIVATIONS, kinds.CACHE, kinds.CONTROLNET, kinds.LORAS, kinds.WORKER)


def asked(kind: str, **facts: Any) -> OpenLinkRequest:
    terms = [LinkTerm(name="model_hash", value="x"), LinkTerm(name="dtype", value="float32")]
    return OpenLinkRequest(**{"kind": kind, "worker": "fuzz", "terms": terms, **facts})


def valid() -> list[Message]:
    return [asked(kind, link_id=link_id) for kind in KINDS for link_id in ("", "0" * 32)]


def link_corpus() -> Iterator[Case]:
    """Of every kind; what is of none goes to the ControlNet server."""
    for kind in KINDS:
        yield from _texts(kind)
        yield from _terms(kind)
    for kind in KINDS:
        if kind == kinds.WORKER:  # it looks at it when it has a peer
            continue
        yield case_of("OpenLink", f"{kind} in the place of a link", asked(kind, link_id="0" * 32))
        for link_id in ("x", "../up", "x" * (1 << 20), "\0"):
            request = asked(kind, link_id=link_id)
            yield case_of("OpenLink", f"{kind} link_id {shown(link_id)}", request, INVALID, "link_id")
    for kind in ("", "gateway", "x" * (1 << 20), "\0"):
        yield case_of("OpenLink", f"kind {shown(kind)}", asked(kind), INVALID, "kind")


def _texts(kind: str) -> Iterator[Case]:
    for worker in ("x", "x" * 128):
        yield case_of("OpenLink", f"{kind} worker {shown(worker)}", asked(kind, worker=worker))
    for worker in ("", "x" * 129):
        yield case_of("OpenLink", f"{kind} worker {shown(worker)}", asked(kind, worker=worker), INVALID, "worker")


def _terms(kind: str) -> Iterator[Case]:
    long = LinkTerm(name="x" * 128, value="x" * 128)
    for terms in ([], [long] * 16):
        yield case_of("OpenLink", f"{kind} {len(terms)} terms", asked(kind, terms=terms))
    yield case_of("OpenLink", f"{kind} 17 terms", asked(kind, terms=[long] * 17), INVALID, "terms")
    for field in ("name", "value"):
        for text in ("", "x" * 129):
            term = LinkTerm(**{"name": "x", "value": "x", field: text})
            name = f"{kind} {field} of a term {shown(text)}"
            yield case_of("OpenLink", name, asked(kind, terms=[term]), INVALID, f"terms[0].{field}")
