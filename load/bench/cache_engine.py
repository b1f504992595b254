"""An engine and an approximate cache in this process: pictures of the embedded model that start from real entries.

As in the suite, but for the link between them: the engine asks the store by a call, and has the answer before its first
step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import PIL.Image
import torch

from bottega import kinds
from bottega.addons.cache.engine import JobRecording, LatentQuestion, LatentReply
from bottega.addons.cache.engine.addon import EngineCachedStarts
from bottega.addons.cache.engine.recorder import latents_in_order
from bottega.addons.loras.engine.addon import EngineLoras
from bottega.addons.loras.wire import canonical
from bottega.cache.latent import RecordedLatent
from bottega.cache.store.settings import StoreSettings
from bottega.cache.store.store import LatentStore
from bottega.diffusion.engine.engine import Engine
from bottega.diffusion.engine.events import CachedStart, ImageDrawn, JobFailed, JobFinished
from bottega.diffusion.engine.job import EngineOrder
from bottega.diffusion.engine.limits import EngineLimits
from bottega.diffusion.model.model import load_model
from bottega.diffusion.spec import LoraSpec, ResolvedSpec
from bottega.diffusion.tensor_messages import DTYPES
from bottega.loras.importing.base import read_base
from bottega.loras.importing.converting import convert, sources
from bottega.miniature import WEIGHTS
from bottega.v1.cache_pb2 import CacheOrder, CacheRecording, CacheStarts
from bottega.v1.fleet_pb2 import ServiceAddress
from bottega.v1.generation_pb2 import FIDELITY_BALANCED, Fidelity, GenerationSpec
from load.bench.kept_pictures import KeptPictures, PictureFolder
from load.bench.local_loras import LocalLoras

GUIDANCE_SCALE = 4.0
STEPS = 30
SIDE = 64
# Jobs that the engine holds: enough for full groups.
_AT_ONCE = 16
# Pictures that are kept together: some minutes of drawing.
_BATCH = 100
_FLUSH_S = 60.0
_LORA_TIMEOUT_S = 60.0
_TORCH = {number: dtype for dtype, number in DTYPES.items()}
_LORAS = WEIGHTS / "loras"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Pictures to draw. cached: whether they may start from latents; recorded: whether the first one may be.

    loras: by name. lora_bound: the step before which they come.
    """

    prompt: str
    seed: int
    steps: int = STEPS
    num_images: int = 1
    cached: bool = False
    recorded: bool = False
    fidelity: Fidelity.ValueType = FIDELITY_BALANCED
    loras: tuple[str, ...] = ()
    lora_bound: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawn:
    """What was drawn. starts: None for a picture that was drawn from noise."""

    ask: Ask
    pictures: tuple[PIL.Image.Image, ...]
    starts: tuple[CachedStart | None, ...]

    @property
    def picture(self) -> PIL.Image.Image:
        """The first."""
        return self.pictures[0]

    @property
    def start(self) -> CachedStart | None:
        """Of the first."""
        return self.starts[0]


class StoreLatents:
    """A LatentSource: see there."""

    def __init__(self, store: LatentStore) -> None:
        self._store = store

    @property
    def linked(self) -> int:
        """It has its own."""
        return 1

    def set_stores(self, stores: Sequence[ServiceAddress]) -> None:
        """There are no others."""

    def ask(self, question: LatentQuestion) -> Future[LatentReply]:
        said = self._store.ask(question.header, question.embedding.numpy())
        answer = Future[LatentReply]()
        answer.set_result(LatentReply(header=said.header, latents=tuple(_tensor(each) for each in said.latents)))
        return answer

    def report(self, reply: LatentReply, starts: CacheStarts) -> None:
        self._store.count_starts(starts)

    def record(self, recording: JobRecording) -> bool:
        latents = latents_in_order(recording)
        spec = GenerationSpec(prompt=recording.spec.prompt, seed=recording.spec.seed)
        self._store.record(
            CacheRecording(
                key=recording.key,
                model_hash=recording.model_hash,
                parameters=spec,
                steps=[step for step, _ in latents],
            ),
            embedding=recording.embedding.numpy(),
            picture=recording.small_picture().numpy(),
            latents=[
                RecordedLatent(dtype=DTYPES[each.dtype], shape=tuple(each.shape), data=each.numpy().tobytes())
                for _, each in latents
            ],
        )
        return True


class CachedEngine:
    """Draws asks, many at once. store: what pictures start from; see StoreSettings for the entries that it keeps.

    kept: where pictures are kept, and taken from if they were drawn before; None draws all.
    """

    def __init__(
        self, store: LatentStore, loras: LocalLoras, digests: Mapping[str, str], kept: PictureFolder | None = None
    ) -> None:
        self.store = store
        self._kept = kept
        self._digests = digests
        model = load_model(WEIGHTS, name="miniature", device=torch.device("cpu"), dtype=torch.float32)
        self.model_hash = model.digest
        limits = EngineLimits(progress_interval_s=0.0)
        addons = (
            EngineLoras(model, loras, patches=True, timeout_s=_LORA_TIMEOUT_S),
            EngineCachedStarts(model, StoreLatents(store)),
        )
        self._engine = Engine(model, limits, addons=addons)

    def draw(self, asks: Sequence[Ask]) -> list[Drawn]:
        """In their order. What is recorded meanwhile is there afterwards."""
        if self._kept is None:
            return self.draw_now(asks)
        drawn: list[Drawn] = []
        for first in range(0, len(asks), _BATCH):
            drawn += self._draw_once(self._kept, asks[first : first + _BATCH])
        return drawn

    def _draw_once(self, kept: PictureFolder, asks: Sequence[Ask]) -> list[Drawn]:
        said = [repr(ask) for ask in asks]
        known = kept.take(said)
        if known is None:
            drawn = self.draw_now(asks)
            kept.keep(said, [KeptPictures(pictures=each.pictures, starts=each.starts) for each in drawn])
            return drawn
        return [
            Drawn(ask=ask, pictures=each.pictures, starts=each.starts) for ask, each in zip(asks, known, strict=True)
        ]

    def draw_now(self, asks: Sequence[Ask]) -> list[Drawn]:
        """The same, whatever was kept, and not kept."""
        left = list(enumerate(asks))[::-1]
        pictures: dict[object, dict[int, PIL.Image.Image]] = {}
        starts: dict[object, dict[int, CachedStart]] = {}
        drawing = 0
        while left or drawing:
            while left and drawing < _AT_ONCE:
                number, ask = left.pop()
                self._engine.submit(self._order(number, ask))
                drawing += 1
            for event in self._engine.turn():
                match event:
                    case ImageDrawn():
                        pictures.setdefault(event.key, {})[event.index] = PIL.Image.fromarray(event.pixels.numpy())
                    case JobFinished():
                        starts[event.key] = {start.image: start for start in event.record.cached_starts}
                        drawing -= 1
                    case JobFailed():
                        raise event.error
        assert self.store.flush(_FLUSH_S), "what was recorded is written"
        return [
            Drawn(
                ask=ask,
                pictures=tuple(picture for _, picture in sorted(pictures[number].items())),
                starts=tuple(starts[number].get(image) for image in range(ask.num_images)),
            )
            for number, ask in enumerate(asks)
        ]

    def _order(self, number: int, ask: Ask) -> EngineOrder:
        said = CacheOrder(read=ask.cached, record=ask.recorded, fidelity=ask.fidelity)
        spec = ResolvedSpec(
            prompt=ask.prompt,
            num_inference_steps=ask.steps,
            guidance_scale=GUIDANCE_SCALE,
            width=SIDE,
            height=SIDE,
            seed=ask.seed,
            num_images=ask.num_images,
            loras=tuple(LoraSpec(name=name, digest=self._digests[name], bound=ask.lora_bound) for name in ask.loras),
        )
        return EngineOrder(key=number, spec=spec, addons={kinds.CACHE: said.SerializeToString()})


@contextmanager
def cached_engine(folder: Path, settings: StoreSettings, kept: PictureFolder | None = None) -> Iterator[CachedEngine]:
    """An engine, with the embedded model's own LoRAs, and a store. folder: for canonical LoRAs. kept: see there."""
    files = {path.name: _canonical(path, folder / f"{path.name}.lora") for path in sorted(_LORAS.iterdir())}
    digests = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    store = LatentStore(settings)
    store.start()
    try:
        with LocalLoras({digests[name]: path for name, path in files.items()}) as loras:
            yield CachedEngine(store, loras, digests, kept)
    finally:
        store.close()


def _canonical(path: Path, target: Path) -> Path:
    """A LoRA of the embedded model as the engine takes it."""
    with target.open("wb") as file:
        canonical.write(file, convert(sources(path), base=read_base(WEIGHTS)).modules)
    return target


def _tensor(latent: RecordedLatent) -> torch.Tensor:
    return torch.frombuffer(bytearray(latent.data), dtype=_TORCH[latent.dtype]).view(latent.shape)
