"""A store of small templates, for tests: what a worker would send, and an edit would take."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bottega.activations.store.recordings import SectionIntake
from bottega.activations.store.settings import ActivationStoreSettings, DropReason
from bottega.activations.store.store import ActivationStore
from bottega.addons.edits.wire import DrawnTensors, SectionLayout
from bottega.caching.tiers import Tier
from bottega.clocks import Clock
from bottega.v1 import activations_pb2 as pb

WAIT_S = 20.0
LAYOUT = SectionLayout.of([("down.0", (16, 8)), ("mid:map", (4, 3)), ("up.1", (16, 8))])
SECTION_BYTES = LAYOUT.size_bytes
SHAPE = (1, 4, 6, 5)
MODEL = "ab" * 32
PROMPT = "cd" * 32
ALL = b"\xff\xff\xff\xfc"
"""A map of SHAPE that has all."""


def key_of(name: str) -> str:
    """What the template of this name is found by."""
    return hashlib.sha256(f"key {name}".encode()).hexdigest()


def recording_of(name: str) -> str:
    return hashlib.sha256(f"recording {name}".encode()).hexdigest()[:32]


def source_of(name: str) -> str:
    return hashlib.sha256(f"source {name}".encode()).hexdigest()


def timestep_of(step: int) -> float:
    """Of the step, from 0 on."""
    return 981.0 - 20.5 * step


def tensors_of(content: str, layout: SectionLayout = LAYOUT) -> list[memoryview]:
    """Elements that follow from `content`, other ones for each tensor."""
    made = []
    for tensor in layout.tensors:
        seed = hashlib.sha256(f"{content} {tensor.name}".encode()).digest()
        made.append(memoryview((seed * (tensor.size_bytes // len(seed) + 1))[: tensor.size_bytes]))
    return made


def drawn_of(name: str) -> DrawnTensors:
    """What the template was drawn with."""
    count = SHAPE[1] * SHAPE[2] * SHAPE[3]
    number = float(len(name))
    return DrawnTensors(
        shape=SHAPE,
        image_latent=struct.pack(f"<{count}f", *[number] * count),
        noise=struct.pack(f"<{count}f", *[-number] * count),
    )


def section_header(name: str, step: int, *, half: int = 1, **changed: Any) -> pb.SectionHeader:
    """Of a section of the template. changed: fields."""
    fields = {
        "recording": recording_of(name),
        "key": key_of(name),
        "section": pb.SectionKey(timestep=timestep_of(step), noise_level=2.0**-step, half=half),
        "prompt": PROMPT,
        "map": ALL,
        "latent_height": SHAPE[2],
        "latent_width": SHAPE[3],
    }
    return pb.SectionHeader(**{**fields, **changed})


def recording_header(name: str, **changed: Any) -> pb.RecordingHeader:
    """Of the end of its recording. changed: fields."""
    fields = {
        "recording": recording_of(name),
        "key": key_of(name),
        "source": source_of(name),
        "digest": "ef" * 32,
        "model": "miniature",
        "model_hash": MODEL,
        "dtype": "float32",
        "width": 48,
        "height": 40,
        "latent_height": SHAPE[2],
        "latent_width": SHAPE[3],
        "has_drawn": True,
        "seed": 7,
    }
    return pb.RecordingHeader(**{**fields, **changed})


def abandoned(name: str, **changed: Any) -> pb.AbandonHeader:
    """Of a recording that comes to nothing. changed: fields."""
    return pb.AbandonHeader(**{"recording": recording_of(name), "key": key_of(name), **changed})


def question_of(name: str, **changed: Any) -> pb.TemplateQuestion:
    """About the template. changed: fields."""
    fields = {
        "key": key_of(name),
        "would_record": True,
        "source": source_of(name),
        "model_hash": MODEL,
        "dtype": "float32",
    }
    return pb.TemplateQuestion(**{**fields, **changed})


def settings_of(folder: Path, **changed: Any) -> ActivationStoreSettings:
    """Room for ten thousand sections on the disk and for a hundred in memory. changed: fields."""
    fields = {
        "folder": folder,
        "disk_budget_bytes": 10_000 * SECTION_BYTES,
        "memory_budget_bytes": 100 * SECTION_BYTES,
        "retry_s": 0.2,
    }
    return ActivationStoreSettings(**{**fields, **changed})


@contextmanager
def running_store(folder: Path, *, clock: Clock | None = None, **changed: Any) -> Iterator[ActivationStore]:
    """A store that has begun, and is ended. changed: fields of its settings."""
    store = ActivationStore(settings_of(folder, **changed), clock=clock)
    store.start()
    try:
        yield store
    finally:
        store.close()


def take_section(
    store: ActivationStore,
    header: pb.SectionHeader,
    layout: SectionLayout,
    views: Sequence[bytes | memoryview],
    link: Hashable,
) -> SectionIntake | DropReason:
    """One that comes in a chunk for each of its tensors; what the store says of it first."""
    intake = store.begin_section(header, layout, link)
    for place, view in enumerate(views):
        if isinstance(intake, SectionIntake) and intake.is_open:
            intake.write(place, 0, memoryview(view))
    return intake


def grant(store: ActivationStore, name: str, *, link: str = "worker") -> None:
    """Lets it record the template, where nobody has; it is no question, which would count."""
    if store._table.get(key_of(name)) is None:
        store._recordings.grant(key_of(name), link)


def send_sections(
    store: ActivationStore, name: str, steps: Sequence[int], *, link: str = "worker", content: str = "", **changed: Any
) -> None:
    """As a worker does that asks before. changed: fields of their headers."""
    grant(store, name, link=link)
    for step in steps:
        views = tensors_of(f"{content or name} {step}")
        take_section(store, section_header(name, step, **changed), LAYOUT, views, link)


def record(store: ActivationStore, name: str, steps: int = 3, *, link: str = "worker", **changed: Any) -> None:
    """Records the template, and waits until it is there. changed: fields of its header."""
    send_sections(store, name, range(steps), link=link)
    header = recording_header(name, **changed)
    store.complete(header, drawn_of(name) if header.has_drawn else None, link)
    store.flush(WAIT_S)


def answer(store: ActivationStore, name: str, *, link: str = "worker", **changed: Any) -> pb.TemplateAnswer:
    """What the store says of the template. changed: fields of the question."""
    return store.answer(question_of(name, **changed), link).header


def read(store: ActivationStore, digest: str) -> tuple[bytes, Tier]:
    """The bytes of a section as a worker gets them, and where they were. Raises what `fetch` does."""
    lease = store.fetch(digest).result(WAIT_S)
    try:
        return os.pread(lease.descriptor, lease.size_bytes, 0), lease.tier
    finally:
        store.give_back(lease)


def elements(data: bytes, layout: SectionLayout = LAYOUT) -> list[bytes]:
    """The tensors of a section's file."""
    places = (layout.place(tensor.name) for tensor in layout.tensors)
    return [data[place : place + size_bytes] for place, size_bytes in places]


def section_paths(folder: Path) -> list[Path]:
    """All files of sections, and of what templates were drawn with."""
    return sorted(path for path in (folder / "sections").glob("??/*"))


def block_profile(**changed: Any) -> pb.BlockProfile:
    """Of the templates' model at their size. changed: fields."""
    fields = {
        "model_hash": MODEL,
        "dtype": "float32",
        "width": 48,
        "height": 40,
        "shares": [0.25, 0.5],
        "blocks": [
            pb.BlockCost(name=each.name, size_bytes=64, full_s=0.5, masked_s=[0.25, 0.375]) for each in LAYOUT.tensors
        ],
        "forward_s": 2.0,
        "about": "measured for a test",
    }
    return pb.BlockProfile(**{**fields, **changed})
