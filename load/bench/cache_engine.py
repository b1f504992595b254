"""An engine and an approximate cache in this process: pictures of an embedded model that start from real entries.

All is as in the suite except for the link between them: the engine asks the store by a call, and has the answer before
its first step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import PIL.Image
import torch
from google.protobuf.json_format import MessageToDict, ParseDict

from bottega import kinds
from bottega.addons.cache.engine import JobRecording, LatentQuestion, LatentReply
from bottega.addons.cache.engine.addon import EngineCachedStarts
from bottega.addons.cache.engine.recorder import latents_in_order
from bottega.addons.loras.engine.addon import EngineLoras
from bottega.addons.loras.wire import canonical
from bottega.addons.loras.wire.module_parts import DENOISERS
from bottega.cache.latent import RecordedLatent
from bottega.cache.store.settings import StoreSettings
from bottega.cache.store.store import LatentStore
from bottega.device_links.tensor_messages import DTYPES
from bottega.engine.engine import Engine
from bottega.engine.events import ImageDrawn, JobFailed, JobFinished
from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.spec import LoraSpec, ResolvedSpec
from bottega.loras.importing.base import read_base
from bottega.loras.importing.converting import convert, sources
from bottega.miniature import WEIGHTS
from bottega.model.model import Model
from bottega.v1.cache_pb2 import CacheOrder, CacheRecording, CacheStarts
from bottega.v1.fleet_pb2 import ServiceAddress
from bottega.v1.generation_pb2 import FIDELITY_BALANCED, CacheUse, Fidelity, GenerationSpec
from load.bench.engine_runs import load_bench_model
from load.bench.local_loras import LocalLoras

STEPS = 30
SIDE = 64
# Jobs that the engine holds: enough for full groups.
_AT_ONCE = 16
# Pictures that are kept together: some minutes of drawing.
_BATCH = 100
_FLUSH_S = 60.0
_LORA_TIMEOUT_S = 60.0
_TORCH = {number: dtype for dtype, number in DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Pictures to draw."""

    prompt: str
    seed: int
    steps: int = STEPS
    num_images: int = 1
    cached: bool = False
    """Whether they may start from latents."""
    recorded: bool = False
    """Whether the first one may be recorded."""
    fidelity: Fidelity.ValueType = FIDELITY_BALANCED
    loras: tuple[str, ...] = ()
    lora_bound: int = 0
    """The step before which LoRAs come."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawn:
    """Pictures that were drawn."""

    ask: Ask
    pictures: tuple[PIL.Image.Image, ...]
    starts: tuple[CacheUse | None, ...]
    """Of each picture; None of one that was drawn from noise."""

    @property
    def picture(self) -> PIL.Image.Image:
        """The first picture."""
        return self.pictures[0]

    @property
    def start(self) -> CacheUse | None:
        """The first picture's start."""
        return self.starts[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPictures:
    """Pictures of one ask, and what each started from."""

    pictures: tuple[PIL.Image.Image, ...]
    starts: tuple[CacheUse | None, ...]


class PictureFolder:
    """Pictures of a long bench that are kept, so that a bench that was ended goes on where it was.

    Batches are in the order in which they were asked for. Each is a PNG for each picture, and a JSON file, which comes
    last, so that a batch is there whole or not at all. A folder is of one bench with one set of options.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._next = 0

    def take(self, asks: Sequence[str]) -> list[KeptPictures] | None:
        """Return the next batch, or None where that was not drawn yet; `keep` it then.

        Raises SystemExit where the folder has something else.

        Args:
            asks: A text for each ask.
        """
        file = self._file(self._next)
        if not file.exists():
            return None
        batch = json.loads(file.read_text(encoding="utf-8"))
        if batch["asks"] != list(asks):
            raise SystemExit(f"{file} is of other options, or of another version: give an empty folder")
        kept = [self._read(place, starts) for place, starts in enumerate(batch["starts"])]
        self._next += 1
        return kept

    def keep(self, asks: Sequence[str], drawn: Sequence[KeptPictures]) -> None:
        """Write the batch that was asked for."""
        for place, each in enumerate(drawn):
            for image, picture in enumerate(each.pictures):
                picture.save(self._picture(place, image))
        starts = [[None if start is None else MessageToDict(start) for start in each.starts] for each in drawn]
        file = self._file(self._next)
        part = file.with_suffix(".part")
        part.write_text(json.dumps({"asks": list(asks), "starts": starts}), encoding="utf-8")
        part.replace(file)
        self._next += 1

    def _read(self, place: int, starts: Sequence[dict[str, object] | None]) -> KeptPictures:
        pictures = []
        for image in range(len(starts)):
            with PIL.Image.open(self._picture(place, image)) as picture:
                pictures.append(picture.copy())
        found = [None if start is None else ParseDict(start, CacheUse()) for start in starts]
        return KeptPictures(pictures=tuple(pictures), starts=tuple(found))

    def _file(self, batch: int) -> Path:
        return self._folder / f"{batch:04d}.json"

    def _picture(self, place: int, image: int) -> Path:
        return self._folder / f"{self._next:04d}-{place:03d}-{image}.png"


class StoreLatents:
    """A LatentSource with one store, in this process."""

    def __init__(self, store: LatentStore) -> None:
        self._store = store

    @property
    def linked(self) -> int:
        """The number of stores."""
        return 1

    def set_stores(self, stores: Sequence[ServiceAddress]) -> None:
        """Ignore other stores."""

    def ask(self, question: LatentQuestion) -> Future[LatentReply]:
        answer = self._store.ask(question.header, question.embedding.numpy())
        reply = Future[LatentReply]()
        reply.set_result(LatentReply(header=answer.header, latents=tuple(map(_tensor, answer.latents))))
        return reply

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
    """Draws pictures, many at once.

    Args:
        model: It draws them.
        store: Pictures start from its entries.
        loras: LoRAs' files by digest.
        digests: Of LoRAs, by name.
        kept: Where pictures are kept, and taken from if they were drawn before.
    """

    def __init__(
        self,
        model: Model,
        store: LatentStore,
        loras: LocalLoras,
        digests: Mapping[str, str],
        kept: PictureFolder | None = None,
    ) -> None:
        self.store = store
        self.loras = tuple(digests)
        """Names of LoRAs that leave the text encoders alone: others are served by their own entries only."""
        self._kept = kept
        self._digests = digests
        self._defaults = model.defaults
        self.model_hash = model.digest
        limits = EngineLimits(progress_interval_s=0.0)
        addons = (
            EngineLoras(model, loras, patches=True, timeout_s=_LORA_TIMEOUT_S),
            EngineCachedStarts(model, StoreLatents(store)),
        )
        self._engine = Engine(model, limits, addons=addons)

    def draw(self, asks: Sequence[Ask]) -> list[Drawn]:
        """Draw in their order. What is recorded meanwhile is in the store afterwards."""
        if self._kept is None:
            return self.draw_now(asks)
        drawn: list[Drawn] = []
        for first in range(0, len(asks), _BATCH):
            drawn += self._draw_once(self._kept, asks[first : first + _BATCH])
        return drawn

    def _draw_once(self, kept: PictureFolder, asks: Sequence[Ask]) -> list[Drawn]:
        keys = [repr(ask) for ask in asks]
        known = kept.take(keys)
        if known is None:
            drawn = self.draw_now(asks)
            kept.keep(keys, [KeptPictures(pictures=each.pictures, starts=each.starts) for each in drawn])
            return drawn
        return [
            Drawn(ask=ask, pictures=each.pictures, starts=each.starts) for ask, each in zip(asks, known, strict=True)
        ]

    def draw_now(self, asks: Sequence[Ask]) -> list[Drawn]:
        """Draw without looking at kept pictures, and keep none."""
        left = list(enumerate(asks))[::-1]
        pictures: dict[object, dict[int, PIL.Image.Image]] = {}
        starts: dict[object, dict[int, CacheUse]] = {}
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
                        starts[event.key] = {start.image: start for start in event.record.provenance.cached_starts}
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
        order = CacheOrder(read=ask.cached, record=ask.recorded, fidelity=ask.fidelity)
        spec = ResolvedSpec(
            prompt=ask.prompt,
            num_inference_steps=ask.steps,
            guidance_scale=self._defaults.guidance_scale,
            width=SIDE,
            height=SIDE,
            seed=ask.seed,
            num_images=ask.num_images,
            sampler=self._defaults.sampler,
            loras=tuple(LoraSpec(name=name, digest=self._digests[name], bound=ask.lora_bound) for name in ask.loras),
        )
        return EngineOrder(key=number, spec=spec, addons={kinds.CACHE: order.SerializeToString()})


@contextmanager
def cached_engine(
    folder: Path, settings: StoreSettings, kept: PictureFolder | None = None, *, model: Path = WEIGHTS
) -> Iterator[CachedEngine]:
    """Run an engine, with those of a model's own LoRAs that leave the text encoders alone, and a store.

    Args:
        folder: For canonical LoRAs.
        kept: See `CachedEngine`.
        model: Folder of an embedded model.
    """
    converted = {path.name: _canonical(model, path, folder) for path in sorted((model / "loras").glob("*"))}
    files = {name: file for name, file in converted.items() if file is not None}
    digests = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    store = LatentStore(settings)
    store.start()
    try:
        with LocalLoras({digests[name]: path for name, path in files.items()}) as loras:
            yield CachedEngine(load_bench_model(model), store, loras, digests, kept)
    finally:
        store.close()


def _canonical(model: Path, path: Path, folder: Path) -> Path | None:
    """Write a model's LoRA as the engine takes it; return None if it changes text encoders."""
    modules = convert(sources(path), base=read_base(model)).modules
    if not {module.component for module in modules}.issubset(DENOISERS):
        return None
    target = folder / f"{path.name}.lora"
    with target.open("wb") as file:
        canonical.write(file, modules)
    return target


def _tensor(latent: RecordedLatent) -> torch.Tensor:
    return torch.frombuffer(bytearray(latent.data), dtype=_TORCH[latent.dtype]).view(latent.shape)
