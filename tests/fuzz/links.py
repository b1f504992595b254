"""The fixed corpus of LinkService, which five kinds of services serve: every field at its limits and one past."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.message import Message

from bottega import kinds
from bottega.v1.link_pb2 import LinkTerm, OpenLinkRequest
from tests.fuzz.case import INVALID, MIB_TEXT, Case, asking, case_of, limits, shown

KINDS = (kinds.ACTIVATIONS, kinds.CACHE, kinds.CONTROLNET, kinds.LORAS, kinds.WORKER)


def asked(kind: str, **facts: Any) -> OpenLinkRequest:
    terms = [LinkTerm(name="model_hash", value="x"), LinkTerm(name="dtype", value="float32")]
    return OpenLinkRequest(**{"kind": kind, "worker": "fuzz", "terms": terms, **facts})


def valid() -> list[Message]:
    return [asked(kind, link_id=link_id) for kind in KINDS for link_id in ("", "0" * 32)]


def link_corpus() -> Iterator[Case]:
    """Of every kind; what is of none goes to the ControlNet server."""
    for kind in KINDS:
        case = asking("OpenLink", asked, kind=kind)
        yield from limits(case, "worker", ("x", "x" * 128), ("", "x" * 129))
        yield from _terms(kind)
        if kind != kinds.WORKER:  # it looks at it when it has a peer
            yield from limits(case, "link_id", ("0" * 32,), ("x", "../up", MIB_TEXT, "\0"))
    yield from limits(asking("OpenLink", asked), "kind", (), ("", "gateway", MIB_TEXT, "\0"))


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
