"""The fixed corpus of ControlNets in requests: of callers, of services that join, and of the gateway to a worker."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc

from bottega import kinds
from bottega.v1 import fleet_pb2
from bottega.v1.controlnet_pb2 import ControlNetHosts, ControlNetServer
from bottega.v1.generation_pb2 import ControlNet, Lora
from bottega.v1.hosted_pb2 import HOSTED_STATE_LOADED, ForwardTime, Hosted, ResidualProfile
from tests.fuzz.case import BAD_NAMES, INF, INVALID, NAN, NOT_FOUND, OK, UNAVAILABLE, Case, limits, refused_load, shown
from tests.fuzz.hosting import LONGEST_NAME
from tests.fuzz.images import good_images, largest_image, some_bad_images, some_good_images, too_large_image
from tests.support.addon_messages import placed

_SCALES = (0.0, -1.0, 1e308, 5e-324)
_BAD_SCALES = (NAN, INF, -INF)
_WITHIN = "spec.controlnets[0]."
# Where it starts and ends.
_SPANS = ((0.0, 1.0), (0.0, 5e-324), (0.999, 1.0))
_BAD_SPANS = ((0.5, 0.5), (-0.1, 1.0), (0.0, 1.1), (NAN, 1.0), (0.0, NAN), (INF, 1.0), (0.0, -INF))
# Nobody listens there: such an attempt is stopped, or finds it out, which is as good.
_NOWHERE = ControlNetServer(name="nowhere", address="127.0.0.1:1")


def control_drawings(case: Any) -> Iterator[Case]:
    """Of callers, to a gateway that knows a server which hosts some. case: makes one."""
    png = good_images()["png"]
    yield case("nine ControlNets", INVALID, "spec.controlnets", controlnets=[ControlNet(name="edges", image=png)] * 9)

    def one(title: str, code: grpc.StatusCode = OK, /, *fields: str, **facts: Any) -> Case:
        nets = [ControlNet(**{"name": "edges", "image": png, **facts})]
        made: Case = case(f"ControlNet of {title}", code, *fields, controlnets=nets)
        return made

    yield from _bounds(one)
    # The last mode is refused because the net is no union.
    yield from limits(one, "control_mode", (), ("sketch", "64", "depth"), within=_WITHIN)
    yield from _control_images(case)
    yield from _controlnets(case, png)


def _bounds(one: Any) -> Iterator[Case]:
    """Yield cases of one ControlNet, whoever asks for it. one: makes one with these fields of it."""
    yield from limits(one, "name", (), BAD_NAMES, within=_WITHIN)
    yield from limits(one, "controlnet_conditioning_scale", _SCALES, _BAD_SCALES, within=_WITHIN)
    for spans, refused in ((_SPANS, ()), (_BAD_SPANS, (INVALID, f"{_WITHIN}control_guidance_start"))):
        for start, end in spans:
            yield one(f"{start} to {end}", *refused, control_guidance_start=start, control_guidance_end=end)


def _control_images(case: Any) -> Iterator[Case]:
    field = "spec.controlnets[1].image"
    png = good_images()["png"]
    for name, image in some_good_images().items():
        yield case(f"control image: {name}", controlnets=[ControlNet(name="edges", image=image)])
    for name, image in some_bad_images().items():
        nets = [ControlNet(name="edges", image=png), ControlNet(name="nobody", image=image)]
        yield case(f"bad control image: {name}", INVALID, field, controlnets=nets)
    yield case("no control image", INVALID, "spec.controlnets[0].image", controlnets=[ControlNet(name="edges")])


def _controlnets(case: Any, png: bytes) -> Iterator[Case]:
    def net(name: str = "edges", **facts: Any) -> ControlNet:
        return ControlNet(name=name, image=png, **facts)

    yield case("eight ControlNets", controlnets=[net()] * 8)
    yield case("the longest name", controlnets=[net(LONGEST_NAME)])
    yield case("guess mode", controlnets=[net(guess_mode=True)])
    yield case("measured residuals", controlnets=[net(measure_similarity=True)])
    yield case("a ControlNet that nobody hosts", NOT_FOUND, controlnets=[net(), net("nobody")])
    yield case("a union that nobody hosts", NOT_FOUND, controlnets=[net("nobody", control_mode="depth")])
    yield case("neither ControlNet nor model", NOT_FOUND, model="nobody", controlnets=[net("nobody")])
    yield case("a LoRA beside it", UNAVAILABLE, loras=[Lora(name="ink")], controlnets=[net("nobody")])
    wrong = [net("a b", controlnet_conditioning_scale=NAN, control_guidance_start=2.0), ControlNet()]
    fields = ("[0].name", "[0].controlnet_conditioning_scale", "[0].control_guidance_start", "[1].name", "[1].image")
    named = [f"spec.controlnets{field}" for field in fields]
    yield case("everything wrong with ControlNets", INVALID, "spec.width", *named, width=0, controlnets=wrong)


_COUNTS = ("size_bytes", "popularity", "sessions", "failed_loads")
_PASS: dict[str, Any] = {"latent_height": 1, "latent_width": 2**31 - 1, "rows": 1, "seconds": 1e-9}
_BAD_PASSES: dict[str, tuple[float, ...]] = {
    "latent_height": (-1,),
    "latent_width": (-1,),
    "rows": (0, -1),
    "seconds": (0.0, -1.0, INF, NAN),
}


def control_loads(case: Any) -> Iterator[Case]:
    """Of services that say what ControlNets they host. case: makes one of them that joins."""

    def net(name: str = "lines", /, **facts: Any) -> Hosted:
        return Hosted(kind=kinds.CONTROLNET, **{"name": name, "digest": "ab", "state": HOSTED_STATE_LOADED, **facts})

    good = {
        "no": [],
        "a nameful of": [net(LONGEST_NAME, digest="x" * 128, base="x" * 128, size_bytes=2**63 - 1)],
        "popular": [net(popularity=2**31 - 1, sessions=2**31 - 1)],
        "1024": [net(f"n{number}") for number in range(1024)],
        "a union among the": [net(control_modes=64)],
        "a bare": [Hosted(kind=kinds.CONTROLNET, name="lines")],
        "unloadable": [net(load_error="x" * 512, failed_loads=2**31 - 1, copied=True)],
        "pinned": [net(pinned=True, load_s=1e308, forward_times=[ForwardTime(**_PASS)] * 64)],
        "well profiled": [net(profiles=[_profile(f"m{number}") for number in range(16)])],
    }
    for name, nets in good.items():
        yield case(f"{name} ControlNets", kind=kinds.CONTROLNET, load=fleet_pb2.Load(hosted=nets))
    bad = {
        "1025": [net(f"n{number}") for number in range(1025)],
        "twice the same": [net(), net()],
        "too long a hash": [net(digest="x" * 129)],
        "too long a base": [net(base="x" * 129)],
        "too long a reason": [net(load_error="x" * 513)],
        **{f"called {shown(name)}": [net(name)] for name in BAD_NAMES},
        **{f"of negative {field}": [net(**{field: -1})] for field in _COUNTS},
        **{f"of {modes} modes": [net(control_modes=modes)] for modes in (-1, 65)},
        **{f"in state {state}": [net(state=state)] for state in (5, 99, -1)},
        **{f"loaded in {shown(seconds)} s": [net(load_s=seconds)] for seconds in (-1.0, INF, NAN)},
        **{
            f"with passes of {field} {shown(value)}": [net(forward_times=[ForwardTime(**{**_PASS, field: value})])]
            for field, values in _BAD_PASSES.items()
            for value in values
        },
        "with 65 passes": [net(forward_times=[ForwardTime(**_PASS)] * 65)],
        "with a profile of nothing": [net(profiles=[ResidualProfile()])],
        "of similarity 2": [net(profiles=[ResidualProfile(model_hash="m", num_inference_steps=1, similarity=2)])],
        "with 17 profiles": [net(profiles=[_profile(f"m{number}") for number in range(17)])],
    }
    for (name, nets), kind in zip(bad.items(), itertools.cycle((kinds.CONTROLNET, kinds.LORAS))):
        whole = case(f"ControlNets {name}, from {kind}", kind=kind, load=fleet_pb2.Load(hosted=nets))
        yield refused_load(whole, "hosted")


def control_attempts(case: Any) -> Iterator[Case]:
    """Of a gateway, to a worker. case: makes one."""
    png = good_images()["png"]

    def ordered(title: str, code: grpc.StatusCode = OK, /, *fields: str, hosts: Any = None, **facts: Any) -> Case:
        net = ControlNet(**{"name": "edges", "image": png, **facts})
        told = ControlNetHosts(**{"digest": "ab", "servers": [_NOWHERE], **(hosts or {})})
        whole = {"addons": placed([told])}
        made: Case = case(f"ControlNet {title}", code, *fields, whole=whole, controlnets=[net])
        return made

    yield case("a ControlNet without hosts", controlnets=[ControlNet(name="edges", image=png)])
    bare = ("spec.controlnets[0].name", "spec.controlnets[0].image")
    yield case("a bare ControlNet", INVALID, *bare, controlnets=[ControlNet()])
    nine = {"addons": placed([ControlNetHosts()] * 9)}
    many = [ControlNet(name="edges", image=png)] * 9
    yield case("nine ControlNets", INVALID, "spec.controlnets", whole=nine, controlnets=many)
    yield case("hosts of no ControlNet", whole=nine)
    noise = case("hosts that are noise", whole={"addons": {kinds.CONTROLNET: b"\xff" * 9}})
    yield replace(noise, refused_later=True)
    for addons in ({"no kind": b""}, {f"k{number}": b"" for number in range(17)}, {"k": bytes((256 << 10) + 1)}):
        yield case(f"add-ons {shown(''.join(addons))}", INVALID, "addons", whole={"addons": addons})
    yield from _ordered_hosts(ordered)
    yield ordered("measured, in guess mode", guess_mode=True, measure_similarity=True)
    yield ordered("with the largest image", image=largest_image())
    yield ordered("with a mode", control_mode="depth")
    yield ordered("with no such mode", INVALID, "spec.controlnets[0].control_mode", control_mode="sketch")
    yield ordered("with an image too large", INVALID, "spec.controlnets[0].image", image=too_large_image())
    yield from _bounds(ordered)


def _ordered_hosts(ordered: Any) -> Iterator[Case]:
    """Where the worker may find one. ordered: makes a case."""
    good: dict[str, Any] = {
        "of the longest digest": {"digest": "x" * 128},
        "of no digest": {"digest": ""},
        "on no server": {"servers": []},
        "on 64 servers": {"servers": [_NOWHERE] * 64},
        "on a server of the longest name": {"servers": [ControlNetServer(name="x" * 128, address="127.0.0.1:1")]},
        "on a server of the longest address": {"servers": [ControlNetServer(name="nowhere", address="x" * 300)]},
        **{f"similar by {number}": {"similarity": number} for number in (-1.0, 0.0, 1.0)},
        "for a pair": {"pair_server": _NOWHERE.name},
    }
    for name, hosts in good.items():
        yield ordered(name, hosts=hosts)
    bad: dict[str, tuple[str, Any]] = {
        "of too long a digest": ("digest", "x" * 129),
        "on 65 servers": ("servers", [_NOWHERE] * 65),
        "on a server without a name": ("servers", [ControlNetServer(address="127.0.0.1:1")]),
        "on a server without an address": ("servers", [ControlNetServer(name="nowhere")]),
        "on a server of a long name": ("servers", [ControlNetServer(name="x" * 129, address="127.0.0.1:1")]),
        "on a server of a long address": ("servers", [ControlNetServer(name="nowhere", address="x" * 301)]),
        **{f"similar by {number}": ("similarity", number) for number in (-1.001, 1.001, NAN, INF, -INF)},
        "for a pair with a server that is not listed": ("pair_server", "nobody"),
    }
    for name, (field, value) in bad.items():
        yield replace(ordered(name, hosts={field: value}), refused_later=True)


def _profile(model_hash: str) -> ResidualProfile:
    return ResidualProfile(model_hash=model_hash, num_inference_steps=200, similarity=-1.0)
