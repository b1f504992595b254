"""The whole card at once: edits with two LoRAs and two ControlNets on servers, beside pictures and edits of others.

Every service there is runs, the activation store and the approximate cache included. Requests come in another order
each time; EXACT, each gives the picture that it gives alone, whoever is beside it; BALANCED, the provenance says what
was used again, and a picture that used the same again is the same one.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from bottega import kinds
from bottega.client import CacheProfile, Client, ControlNet, LengthClass, Picture, SkipProfile
from bottega.client.types.provenance import Provenance
from bottega.miniature import WEIGHTS
from bottega.v1.activations_pb2 import DropTemplateRequest, ListStoredTemplatesRequest, Template
from bottega.v1.activations_pb2_grpc import ActivationServiceStub, TemplateServiceStub
from tests.samples.edits import box_mask, ellipse_mask, template
from tests.samples.hostile_images import saved
from tests.support.services import FREE_PORTS, Service, Services, gateway_config, worker_config
from tests.support.stock import assert_same_image, pixels_of
from tests.support.waiting import wait_until

CALL_S = 10.0
# Between two arrivals, at most: a step or two of the embedded model.
GAP_S = 0.1
# Rounds until requests have shared a step: on a busy machine a turn of several may seem to take longer.
_ROUNDS = 9
SEED = 16
STEPS = 6
CONTROLNETS, LORAS = ("edges", "layout"), ("striped", "dusk", "checked")
EDITED = "a small green circle on a white background"
STAR = "a big red star on the left on a blue background"
OPTIONS: dict[str, Any] = {"num_inference_steps": STEPS, "guidance_scale": 4.0, "timeout_s": 120.0}
IMAGE = saved(template())
CARD: dict[str, Any] = {
    "image": IMAGE,
    "mask_image": saved(ellipse_mask()),
    "lora": [(LORAS[0], 0.8), (LORAS[1], 0.6)],
    "controlnets": [
        ControlNet(CONTROLNETS[0], saved(template().rotate(90)), controlnet_conditioning_scale=0.8),
        ControlNet(CONTROLNETS[1], saved(template().rotate(180)), controlnet_conditioning_scale=0.6),
    ],
}
# Whatever is recorded under a picture's key is similar enough for a third of the steps.
_FRACTION = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request, with a seed of its own."""

    prompt: str
    seed: int
    options: Mapping[str, Any] = field(default_factory=dict)

    def draw(self, client: Client, **further: Any) -> Picture:
        """further: options."""
        return client.generate(self.prompt, **{"seed": self.seed, **OPTIONS, **self.options, **further})


WHOLE = "the whole card"
CAST = {
    WHOLE: Asked(prompt=EDITED, seed=4, options=CARD),
    "a picture": Asked(prompt=STAR, seed=3),
    "a longer picture": Asked(prompt=STAR, seed=5, options={"num_inference_steps": STEPS + 3}),
    "a picture with a LoRA": Asked(prompt=STAR, seed=6, options={"lora": [(LORAS[2], 0.7)]}),
    "a picture with a ControlNet": Asked(prompt=STAR, seed=7, options={"controlnets": CARD["controlnets"][:1]}),
    "another edit": Asked(prompt=EDITED, seed=8, options={"image": IMAGE, "mask_image": saved(box_mask())}),
}
EDITS = (WHOLE, "another edit")


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """All services."""

    client: Client
    store: ActivationServiceStub
    templates: TemplateServiceStub

    def drop_copies(self) -> None:
        """Has the worker forget its copies of templates, so that they come from the store."""
        self.templates.DropTemplate(DropTemplateRequest(), timeout=CALL_S)

    def stored(self) -> list[Template]:
        answer = self.store.ListStoredTemplates(ListStoredTemplatesRequest(), timeout=CALL_S)
        return [each for each in answer.templates if not each.recording]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with Services(tmp_path_factory.mktemp("house")) as services, ThreadPoolExecutor(3) as pool:
        gateway = services.start("gateway", gateway_config())
        starting = [pool.submit(start, services, gateway) for start in (_start_worker, *_starts())]
        worker, store, *_ = [each.result() for each in starting]
        with (
            Client(gateway.address, fleet_address=gateway.fleet, timeout_s=120.0) as client,
            grpc.insecure_channel(store.address) as to_store,
            grpc.insecure_channel(worker.address) as to_worker,
        ):
            wait_until(lambda: bool(client.models()), "the worker to join")
            wait_until(lambda: len(client.controlnets()) == len(CONTROLNETS), "the ControlNet servers to join")
            wait_until(lambda: len(client.loras()) == len(LORAS), "the LoRAs to be there")
            yield House(client=client, store=ActivationServiceStub(to_store), templates=TemplateServiceStub(to_worker))


def _start_worker(services: Services, gateway: Service) -> Service:
    engine = {"model": "miniature", "threads": 1, "max_rows": 8}
    return services.start("worker", worker_config(gateway.fleet, name="worker", engine=engine))


def _starts() -> Iterator[Callable[[Services, Service], Service]]:
    """The stores, that of activations first, and a ControlNet server for each ControlNet."""

    def start(kind: str, **config: object) -> Callable[[Services, Service], Service]:
        def begin(services: Services, gateway: Service) -> Service:
            said = {"name": config.get("name", kind), "gateway": gateway.fleet, "server": FREE_PORTS, **config}
            return services.start(kind, said)

        return begin

    yield start(kinds.ACTIVATIONS, min_free_bytes=0)
    # The same prompts are drawn again and again.
    yield start(kinds.CACHE, exploration=0.0, row_pictures=1, min_free_bytes=0)
    yield start(kinds.LORAS, loras={name: {"path": f"miniature/{name}"} for name in LORAS})
    for net in CONTROLNETS:
        folder = str(WEIGHTS / "controlnets" / net)
        yield start(kinds.CONTROLNET, name=f"{net} server", engine={"threads": 1}, controlnets={net: folder})


def shuffled(client: Client, chance: random.Random, **further: Any) -> dict[str, Picture]:
    """All of the cast, as they come: in any order, within a few steps of each other."""
    names = chance.sample(sorted(CAST), len(CAST))
    with ThreadPoolExecutor(len(names)) as pool:
        drawing = {}
        for name in names:
            drawing[name] = pool.submit(CAST[name].draw, client, **further)
            time.sleep(chance.uniform(0, GAP_S))
        return {name: each.result() for name, each in drawing.items()}


@pytest.fixture(scope="module")
def alone(house: House) -> dict[str, Picture]:
    """Each of the cast, EXACT, when nobody else is there."""
    return {name: asked.draw(house.client, fidelity="exact") for name, asked in CAST.items()}


@pytest.mark.timeout(300)
def test_exact_no_picture_depends_on_its_neighbours(house: House, alone: Mapping[str, Picture]) -> None:
    chance = random.Random(SEED)
    most_at_once = 0.0
    for _ in range(_ROUNDS):
        if most_at_once > 1:
            break
        for name, picture in shuffled(house.client, chance, fidelity="exact").items():
            made = picture.provenance
            assert_same_image(pixels_of(picture.pil()), pixels_of(alone[name].pil()))
            assert (made.exact, made.blocks_reused, list(made.cached_starts)) == (True, 0, []), name
            most_at_once = max(most_at_once, made.mean_group_requests)
    assert most_at_once > 1, "nobody was beside anybody"
    whole = alone[WHOLE].provenance
    assert [set(use.servers) for use in whole.controlnets] == [{f"{net} server"} for net in CONTROLNETS]
    assert [use.name for use in whole.loras] == list(LORAS[:2])


def test_every_part_of_the_card_counts(house: House, alone: Mapping[str, Picture]) -> None:
    """Else nobody would see one that is left out."""
    for less in (
        {"lora": CARD["lora"][:1]},
        {"lora": CARD["lora"][1:]},
        {"controlnets": CARD["controlnets"][:1]},
        {"controlnets": CARD["controlnets"][1:]},
        {"mask_image": saved(box_mask())},
    ):
        drawn = CAST[WHOLE].draw(house.client, fidelity="exact", **less)
        assert drawn.pil().tobytes() != alone[WHOLE].pil().tobytes(), less


# LoRAs and residuals that come when they come would make other pictures of the same request.
BALANCED: dict[str, Any] = {"fidelity": "balanced", "bounded_lora_loading": False, "stale_residuals": False}


@pytest.fixture(scope="module")
def recorded(house: House) -> dict[str, str]:
    """By edit, its template's recording, which the store has; and the cache has a latent of every plain picture."""
    (model,) = house.client.models()
    enough = SkipProfile(classes=(LengthClass(max_words=math.inf, thresholds={_FRACTION: -1.0}),))
    house.client.set_cache_profile(CacheProfile(model_hash=model.model_hash, balanced=enough, fast=enough))
    for name, seed in itertools.product(CAST, (100, 101)):
        drawn = CAST[name].draw(house.client, **BALANCED, seed=seed)
        if name in EDITS and seed == 100:
            assert drawn.provenance.mask.recorded, drawn.provenance.mask.computed_all_because
    wait_until(lambda: len(house.stored()) == len(EDITS), "the store to have all templates")
    found = {name: CAST[name].draw(house.client, **BALANCED).provenance.mask.recording for name in EDITS}
    assert sorted(found.values()) == sorted(each.id for each in house.stored())
    return found


@pytest.mark.timeout(300)
def test_balanced_the_provenance_says_what_was_used_again(house: House, recorded: Mapping[str, str]) -> None:
    chance = random.Random(SEED)
    first: dict[tuple[object, ...], Picture] = {}
    reused: Counter[tuple[str, bool]] = Counter()
    started = 0
    for from_store in (False, True):
        if from_store:
            house.drop_copies()
        for name, picture in shuffled(house.client, chance, **BALANCED).items():
            made = picture.provenance
            assert_says_what_was_reused(made, recorded.get(name, ""))
            reused[name, from_store] += made.blocks_reused
            started += len(made.cached_starts)
            if made.blocks_reused == made.blocks_total:  # else which ones were, the time has decided
                same = name, *((use.entry, use.from_step) for use in made.cached_starts)
                assert_same_image(pixels_of(picture.pil()), pixels_of(first.setdefault(same, picture).pil()))
    assert started, "no picture started from a cached latent"
    assert {name for name, *_ in first} == set(CAST)
    assert all(reused[name, from_store] for name in EDITS for from_store in (False, True)), reused


def test_a_trace_says_where_the_time_went_in_all_services(house: House, recorded: Mapping[str, str]) -> None:
    house.drop_copies()
    drawn = {name: CAST[name].draw(house.client, **BALANCED, seed=300) for name in (WHOLE, "a picture")}
    traces = {name: house.client.job(picture.job_id).trace() for name, picture in drawn.items()}
    tracks = {name: {(span.service, span.track) for span in trace.spans} for name, trace in traces.items()}
    everywhere = {("gateway", "jobs"), ("gateway", "attempts")}
    everywhere |= {("worker", track) for track in ("encode", "denoise", "decode", "codec")}
    servers = {(f"{net} server", f"ControlNet {net}") for net in CONTROLNETS}
    adapters = {("worker", f"LoRA {lora}") for lora in LORAS[:2]}
    stored = {("worker", "activation store"), ("activations", "look-ups"), ("activations", "waits")}
    assert everywhere | servers | adapters | stored <= tracks[WHOLE]
    assert everywhere | {("worker", "approximate cache"), ("cache", "look-ups")} <= tracks["a picture"]
    for name, trace in traces.items():
        (attempt,) = [span for span in trace.spans if span.track == "attempts"]
        elsewhere = [span for span in trace.spans if span.service != "gateway"]
        # Its message took a moment to come, and it was answered before the last word was sent.
        assert all(attempt.begin_s - 0.05 < span.begin_s <= span.end_s < attempt.end_s + 0.05 for span in elsewhere)
        decoded_s = sum(span.seconds for span in trace.spans if span.track == "decode")
        stages = {each.stage: each.seconds for each in drawn[name].provenance.times}
        assert decoded_s == pytest.approx(stages["decode"], abs=1e-4)
        assert trace.dropped == 0
    calls = [span.name for span in traces[WHOLE].spans if span.service == f"{CONTROLNETS[0]} server"]
    assert calls == [f"residuals of step {step}" for step in range(STEPS)][-len(calls) :]
    assert any(span.name.startswith("load step") for span in traces[WHOLE].spans)


def assert_says_what_was_reused(made: Provenance, recording: str) -> None:
    """recording: of an edit; empty of a picture."""
    reused, mask = made.blocks_reused, made.mask
    assert 0 <= reused <= made.blocks_total
    assert mask.recording == (recording if reused else "")
    assert bool(mask.computed_all_because) == bool(recording and not reused)
    assert (0 < mask.computed_share < 1) == bool(reused)
    assert not (made.exact and (reused or made.cached_starts))
