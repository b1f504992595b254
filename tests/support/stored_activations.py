"""A worker's links to scripted activation stores, and small templates that these have."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bottega.addons.edits.engine.recordings.recording import DrawnTemplate, Recording, RecordingKey, StepKey
from bottega.addons.edits.engine.recordings.source import TemplateQuery
from bottega.addons.edits.wire import DrawnTensors
from bottega.addons.edits.worker import ActivationLinkSettings, ActivationSettings, StoreActivations
from bottega.model.rows import Half
from bottega.transport import LinkCounters
from bottega.v1.activations_pb2 import SectionKey
from tests.fakes.fake_time import FakeTime
from tests.fakes.scripted_activation_store import ScriptedStore, Section
from tests.support.offers import LocalOffers
from tests.support.waiting import EVENTUALLY_S, wait_until

RECORDING = "0" * 31 + "1"
SHAPE = (4, 6)
"""Of the latent."""

KEY = RecordingKey(model_hash="ab" * 32, dtype="float32", template="cd" * 32, tenant="t")
SHAPES = {"down.block": (6, 8), "up.block": (24, 4), "up.resnet:map": (4, 4, 6)}
SETTINGS = ActivationSettings(
    budget_bytes=1 << 20,
    model_name="m",
    latent_scale=8,
    link=ActivationLinkSettings(retry_s=0.05, upload_bytes=1 << 20),
)


def settings(*, budget_bytes: int = 1 << 20, upload_bytes: int = 1 << 20) -> ActivationSettings:
    return replace(SETTINGS, budget_bytes=budget_bytes, link=replace(SETTINGS.link, upload_bytes=upload_bytes))


def outputs(seed: int) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=chance).half() for name, shape in SHAPES.items()}


def valid_map(seed: int = 0) -> Tensor:
    return torch.rand(SHAPE, generator=torch.Generator().manual_seed(seed)) < 0.7


def step_key(place: int) -> StepKey:
    """Of a step of a template."""
    return StepKey(timestep=900.5 - 100 * place, noise_level=2.0**-place, half=Half.CONDITIONAL, controls=())


def section(place: int, *, key: RecordingKey = KEY, prompt: str = "", seed: int | None = None) -> Section:
    """Of a step of a template."""
    said = step_key(place)
    return Section(
        key=SectionKey(
            timestep=said.timestep, noise_level=said.noise_level, half=said.half.value, controls=said.controls
        ),
        tensors=outputs(place if seed is None else seed),
        template=key.digest,
        valid=valid_map(place),
        prompt=prompt,
    )


def drawn(seed: int = 3) -> DrawnTensors:
    template = drawn_template(seed)
    image_latent, noise = (tensor.numpy().tobytes() for tensor in (template.image_latent, template.noise))
    return DrawnTensors(shape=(1, 4, *SHAPE), image_latent=image_latent, noise=noise)


def drawn_template(seed: int = 3) -> DrawnTemplate:
    """The same as the engine has them."""
    made = torch.randn(2, 1, 4, *SHAPE, generator=torch.Generator().manual_seed(seed))
    return DrawnTemplate(image_latent=made[0], noise=made[1], seed=seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A worker's source, and offers of its links."""

    source: StoreActivations
    offers: LocalOffers
    time: FakeTime

    def ask(self, key: RecordingKey = KEY, recording: str = "") -> None:
        asked = self.source.ask(TemplateQuery(key=key, recording=recording, origin="ef" * 32))
        asked.result(EVENTUALLY_S)

    def find(self, key: RecordingKey = KEY, recording: str = "") -> Recording | None:
        self.ask(key, recording)
        return self.source.find(key, recording)

    def found(self, key: RecordingKey = KEY, recording: str = "") -> Recording:
        """The same, where it is there."""
        recorded = self.find(key, recording)
        assert recorded is not None
        return recorded

    def record(self, steps: int = 2, key: RecordingKey = KEY) -> Recording:
        """Records a template of so many steps, of which it asks before."""
        self.ask(key)
        begun = self.source.begin(key, SHAPE, drawn_template(), origin="ef" * 32)
        assert begun is not None
        for place in range(steps):
            self.add(begun, place)
        self.source.complete(begun)
        return begun

    def add(self, recording: Recording, place: int, *, seed: int | None = None) -> None:
        made = outputs(place if seed is None else seed)
        assert self.source.reserve(recording, recording.held_bytes + sum(tensor.nbytes for tensor in made.values()))
        recording.add(step_key(place), made, valid_map(place), prompt="12" * 32)
        self.source.changed(recording, step_key(place))

    @property
    def counts(self) -> Mapping[str, int]:
        return self.source.counts

    def counted(self, name: str) -> Callable[[], bool]:
        return lambda: self.counts.get(name, 0) > 0


@contextlib.contextmanager
def worker(*stores: ScriptedStore, made: ActivationSettings = SETTINGS, opens: bool = True) -> Iterator[Worker]:
    """A worker's links to these, all open, and the stores closed in the end."""
    offers, fake = LocalOffers(*stores), FakeTime()
    source = StoreActivations(made, offers=offers, counters=LinkCounters(), clock=fake.monotonic)
    try:
        if opens:
            source.set_stores(offers.addresses())
            wait_until(lambda: source.linked == len(stores), "the links")
        yield Worker(source=source, offers=offers, time=fake)
    finally:
        source.set_stores(())
        for store in stores:
            store.close()
