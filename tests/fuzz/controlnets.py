"""The fixed corpus of a ControlNet server's methods: every field at its limits and one past."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.message import Message

from bottega.v1 import controlnet_pb2
from bottega.v1.hosted_pb2 import ResidualProfile
from tests.fuzz.case import ALREADY_EXISTS, BAD_NAMES, INF, INVALID, NAN, NOT_FOUND, Case, case_of, shown
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
    for names in ([], [NET], ["nobody"] * 256, ["x" * 200], [f"{'x' * 195}@shop"]):
        yield case_of("Prefetch", f"{len(names)} names", controlnet_pb2.PrefetchRequest(names=names))
    for name in BAD_NAMES:
        request = controlnet_pb2.PrefetchRequest(names=[NET, name])
        yield case_of("Prefetch", f"name {shown(name)}", request, INVALID, "names[1]")
    many = controlnet_pb2.PrefetchRequest(names=["x"] * 257)
    yield case_of("Prefetch", "257 names", many, INVALID, "names")
    unneeded = controlnet_pb2.PrefetchRequest(unneeded=[NET, "nobody"])
    yield case_of("Prefetch", "unneeded names", unneeded)
    yield case_of("Prefetch", "copies", controlnet_pb2.PrefetchRequest(names=[NET], copies=True))
    yield case_of("Prefetch", "retry", controlnet_pb2.PrefetchRequest(names=[NET], retry=True))
    for name in BAD_NAMES:
        request = controlnet_pb2.PrefetchRequest(unneeded=[NET, name])
        yield case_of("Prefetch", f"unneeded name {shown(name)}", request, INVALID, "unneeded[1]")
        pin = controlnet_pb2.PinControlNetRequest(name=name)
        yield case_of("PinControlNet", f"name {shown(name)}", pin, INVALID, "name")
    for pinned in (True, False):
        pin = controlnet_pb2.PinControlNetRequest(name=NET, pinned=pinned)
        yield case_of("PinControlNet", f"pinned {pinned}", pin)
    nobody = controlnet_pb2.PinControlNetRequest(name="nobody", pinned=True)
    yield case_of("PinControlNet", "an unknown name", nobody, NOT_FOUND)


def _folders() -> Iterator[Case]:
    def added(**facts: Any) -> controlnet_pb2.AddControlNetRequest:
        return controlnet_pb2.AddControlNetRequest(**{"name": "mine", "folder": NET, **facts})

    yield case_of("AddControlNet", "below the root", added(name="x" * 200))
    for name in BAD_NAMES:
        yield case_of("AddControlNet", f"name {shown(name)}", added(name=name), INVALID, "name")
    for folder in ("", "/", "..", f"{NET}/../..", "/etc", "nobody", "\0", "x" * 4096, "x" * 4097, "~", "$HOME"):
        yield case_of("AddControlNet", f"folder {shown(folder)}", added(folder=folder), INVALID, "folder")
    configured = added(name=NET, folder=NET)
    yield case_of("AddControlNet", "a name of the configuration", configured, ALREADY_EXISTS)
    for wrong, folder in FOLDERS.items():
        yield case_of("AddControlNet", f"a folder with {wrong}", added(folder=folder), INVALID, "folder")
    yield case_of("AddControlNet", "nothing at all", added(name="", folder=""), INVALID, "name", "folder")


def _profiles(digest: str) -> Iterator[Case]:
    def measured(name: str = NET, of: str = digest, **facts: Any) -> controlnet_pb2.SetProfileRequest:
        return controlnet_pb2.SetProfileRequest(name=name, digest=of, profile=_profile(**facts))

    for field, good, bad in _PROFILES:
        for value in good:
            facts: dict[str, Any] = {field: value}
            yield case_of("SetProfile", f"{field} {shown(value)}", measured(**facts))
        for value in bad:
            facts = {field: value}
            yield case_of("SetProfile", f"{field} {shown(value)}", measured(**facts), INVALID, f"profile.{field}")
    yield case_of("SetProfile", "another version", measured(of="ab"), NOT_FOUND)
    yield case_of("SetProfile", "an unknown name", measured("nobody"), NOT_FOUND)
    for name in BAD_NAMES:
        yield case_of("SetProfile", f"name {shown(name)}", measured(name), INVALID, "name")
    nothing = ("name", "profile.model_hash", "profile.num_inference_steps")
    yield case_of("SetProfile", "nothing at all", controlnet_pb2.SetProfileRequest(), INVALID, *nothing)


def _profile(**facts: Any) -> ResidualProfile:
    return ResidualProfile(**{"model_hash": "m", "num_inference_steps": 30, "similarity": 0.995, **facts})
