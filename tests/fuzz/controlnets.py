"""The fixed corpus of a ControlNet server's methods: every field at its limits and one past."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import grpc
from google.protobuf.message import Message

from bottega.v1 import controlnet_pb2
from bottega.v1.hosted_pb2 import ResidualProfile
from tests.fuzz.case import (
    ALREADY_EXISTS,
    BAD_NAMES,
    INF,
    INVALID,
    NAN,
    NOT_FOUND,
    OK,
    Case,
    asking,
    case_of,
    limits,
    shown,
)
from tests.samples.hostile_controlnets import FOLDERS

NET = "edges"
"""A ControlNet that the server hosts, and its folder below the root."""

ROOT_PREFIX = "bottega-fuzz-root-"
"""How the name of the root begins. Beside NET it has the folders of hostile_controlnets."""

# Values of a field that are taken, and that are not.
_PROFILES: tuple[tuple[str, tuple[Any, ...], tuple[Any, ...]], ...] = (
    ("model_hash", ("m", "x" * 128), ("", "x" * 129)),
    ("num_inference_steps", (1, 200), (0, -1, 201, 2**31 - 1)),
    ("similarity", (-1.0, 0.0, 1.0), (1.001, -1.001, NAN, INF, -INF)),
)


def valid(method: str, digest: str) -> list[Message]:
    """Requests that are taken. digest: of NET."""
    match method:
        case "Prefetch":
            return [controlnet_pb2.PrefetchRequest(names=[NET, "nobody"])]
        case "AddControlNet":
            return [controlnet_pb2.AddControlNetRequest(name="mine", folder=NET)]
        case "PinControlNet":
            return [controlnet_pb2.PinControlNetRequest(name=NET, pinned=True)]
        case "SetProfile":
            return [controlnet_pb2.SetProfileRequest(name=NET, digest=digest, profile=_profile())]
        case _:
            return [controlnet_pb2.ListControlNetsRequest()]


def controlnet_corpus(digest: str) -> Iterator[Case]:
    """digest: of NET."""
    yield case_of("ListControlNets", "the only one", controlnet_pb2.ListControlNetsRequest())
    yield from _names()
    yield from _folders()
    yield from _profiles(digest)


def _names() -> Iterator[Case]:
    case = asking("Prefetch", controlnet_pb2.PrefetchRequest)
    good: Sequence[list[str]] = ([], [NET], ["nobody"] * 256, ["x" * 200], [f"{'x' * 195}@shop"])
    yield from limits(case, "names", good, (["x"] * 257,))
    yield case("unneeded names", unneeded=[NET, "nobody"])
    for switch in ("copies", "retry"):
        yield case(switch, names=[NET], **{switch: True})
    for name in BAD_NAMES:
        for field in ("names", "unneeded"):
            yield case(f"{field} with {shown(name)}", INVALID, f"{field}[1]", **{field: [NET, name]})
    pin = asking("PinControlNet", controlnet_pb2.PinControlNetRequest)
    yield from limits(pin, "name", (), BAD_NAMES)
    yield from limits(pin, "pinned", (True, False), name=NET)
    yield pin("an unknown name", NOT_FOUND, name="nobody", pinned=True)


def _folders() -> Iterator[Case]:
    case = asking("AddControlNet", controlnet_pb2.AddControlNetRequest, name="mine", folder=NET)
    yield from limits(case, "name", ("x" * 200,), BAD_NAMES)
    bad = ("", "/", "..", f"{NET}/../..", "/etc", "nobody", "\0", "x" * 4096, "x" * 4097, "~", "$HOME")
    yield from limits(case, "folder", (), (*bad, *FOLDERS.values()))
    yield case("a name of the configuration", ALREADY_EXISTS, name=NET)
    yield case("nothing at all", INVALID, "name", "folder", name="", folder="")


def _profiles(digest: str) -> Iterator[Case]:
    request = controlnet_pb2.SetProfileRequest
    case = asking("SetProfile", request, name=NET, digest=digest, profile=_profile())

    def measured(name: str, code: grpc.StatusCode = OK, /, *fields: str, **facts: Any) -> Case:
        made: Case = case(name, code, *fields, profile=_profile(**facts))
        return made

    for field, good, bad in _PROFILES:
        yield from limits(measured, field, good, bad, within="profile.")
    yield case("another version", NOT_FOUND, digest="ab")
    yield case("an unknown name", NOT_FOUND, name="nobody")
    yield from limits(case, "name", (), BAD_NAMES)
    nothing = ("name", "profile.model_hash", "profile.num_inference_steps")
    yield case_of("SetProfile", "nothing at all", request(), INVALID, *nothing)


def _profile(**facts: Any) -> ResidualProfile:
    return ResidualProfile(**{"model_hash": "m", "num_inference_steps": 30, "similarity": 0.995, **facts})
