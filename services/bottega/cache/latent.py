"""Values of the cache: latents received from and sent to workers, and entries with their latents."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bottega.addons.cache.placement import placement_key
from bottega.addons.cache.wire import MAX_EMBEDDING, MAX_LATENTS, MAX_PICTURE_SIDE
from bottega.cache.eviction import Usage
from bottega.transport import DType
from bottega.v1.cache_pb2 import CacheAnswer, CacheEntry, CacheRecording

Vector = npt.NDArray[np.float32]

_KEY = re.compile(r"[0-9a-f]{64}")
_MODEL_HASH = re.compile(r"[0-9a-f]{1,128}")
# Upper bound on a step that fits into a file name. A request has at most some hundred steps (bottega.rules).
MAX_STEP = 999


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedLatent:
    """A latent in the form in which it is stored and sent: data type, shape and bytes."""

    dtype: DType
    shape: tuple[int, ...]
    """Channels, height, width."""
    data: bytes | memoryview
    """Its elements in row-major order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoreAnswer:
    """The answer to a worker's question."""

    header: CacheAnswer
    latents: tuple[RecordedLatent, ...]
    """The latent of each hit in the header, in the same order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EntryDetails:
    """The data of an entry that is shown to users."""

    entry: CacheEntry
    picture: np.ndarray | None
    """uint8, [height, width, 3]; None if its file is missing or damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryPicture:
    """The small picture of an entry, stored as RGB bytes in a file."""

    height: int
    width: int
    digest: bytes
    """SHA-256 of its bytes."""

    @property
    def size_bytes(self) -> int:
        """Bytes of its file."""
        return self.height * self.width * 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A cached image: the properties that all of its latents have in common."""

    number: int
    """Integer ID, unique in the store."""
    name: str
    """Public name: 32 hex digits."""
    noise: int
    """Seed of the image, which identifies its initial noise; a unique negative number if it is unknown."""
    key: str
    model_hash: str
    dtype: DType
    """Data type of its latents."""
    shape: tuple[int, ...]
    """Shape of each latent: [channels, height, width]."""
    picture: EntryPicture
    recorded_s: float
    """Time of the recording, in Unix seconds."""
    place: str
    """Key by which workers choose the cache that they ask (`placement_key`)."""

    @property
    def latent_bytes(self) -> int:
        """Bytes of each of its latents."""
        return math.prod(self.shape) * self.dtype.item_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptLatent:
    """A stored latent of an entry, without its data."""

    digest: bytes
    """SHA-256 of its bytes."""
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EntryRecord:
    """An entry as it is stored in the records."""

    entry: Entry
    embedding: bytes
    """Embedding of its prompt: float32, as bytes."""
    parameters: bytes
    """Serialized GenerationSpec of its image."""
    hits: int
    """Number of images that started from it."""
    latents: dict[int, KeptLatent]
    """Its latents, by the number of steps after which they were recorded."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckedRecording:
    """A recording that follows the rules of cache.proto. The class owns its data."""

    key: str
    place: str
    """See `Entry.place`."""
    model_hash: str
    parameters: bytes
    embedding: Vector
    """Embedding of the recorded prompt."""
    picture: bytes
    """Its small picture: RGB, as bytes."""
    height: int
    width: int
    dtype: DType
    shape: tuple[int, ...]
    latents: dict[int, bytes]
    """Bytes of the latents, by step."""

    @property
    def each_bytes(self) -> int:
        """Bytes of each of its latents."""
        return math.prod(self.shape) * self.dtype.item_bytes

    @property
    def file_bytes(self) -> int:
        """Bytes of all its latents and its picture."""
        return self.each_bytes * len(self.latents) + len(self.picture)

    @property
    def size_bytes(self) -> int:
        """Approximate bytes in memory."""
        return self.file_bytes + self.embedding.nbytes + len(self.parameters)


def to_recording(
    header: CacheRecording, *, embedding: Vector, picture: npt.NDArray[np.uint8], latents: Sequence[RecordedLatent]
) -> CheckedRecording:
    """Return a checked copy of a recording. Raises ValueError if it breaks a rule of cache.proto."""
    check_key(header.key)
    checked_embedding(embedding)
    if not _MODEL_HASH.fullmatch(header.model_hash):
        raise ValueError("the model hash of a recording must have 1 to 128 hex digits")
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
        raise ValueError("the picture of a recording must be RGB")
    if not 0 < max(picture.shape) <= MAX_PICTURE_SIDE or not picture.size:
        raise ValueError(f"the picture of a recording must have 1 to {MAX_PICTURE_SIDE} pixels a side")
    dtype, shape = _check_latents(header.steps, latents)
    if header.plain_key:
        check_key(header.plain_key)
    return CheckedRecording(
        key=header.key,
        place=placement_key(header.plain_key or header.key, embedding),
        model_hash=header.model_hash,
        parameters=header.parameters.SerializeToString(),
        embedding=embedding.copy(),
        picture=picture.tobytes(),
        height=picture.shape[0],
        width=picture.shape[1],
        dtype=dtype,
        shape=shape,
        latents={step: bytes(latent.data) for step, latent in zip(header.steps, latents, strict=True)},
    )


def check_key(key: str) -> None:
    """Raise ValueError if the text is not a key (64 hex digits)."""
    if not _KEY.fullmatch(key):
        raise ValueError("the key of a cached latent must have 64 hex digits")


def checked_embedding(embedding: Vector) -> Vector:
    """Return the embedding unchanged. Raises ValueError if it is zero, not finite or malformed."""
    if embedding.dtype != np.float32 or embedding.ndim != 1 or not 0 < embedding.size <= MAX_EMBEDDING:
        raise ValueError(f"an embedding must be a float32 vector of at most {MAX_EMBEDDING} numbers")
    # In single precision, like the index, because squares of finite numbers may overflow.
    with np.errstate(over="ignore"):
        length = float(np.linalg.norm(embedding))
    if not (math.isfinite(length) and length > 0.0):
        raise ValueError("an embedding must be finite and not zero")
    return embedding


def _check_latents(steps: Sequence[int], latents: Sequence[RecordedLatent]) -> tuple[DType, tuple[int, ...]]:
    if len(steps) != len(latents) or not 1 <= len(latents) <= MAX_LATENTS:
        raise ValueError(f"a recording must have 1 to {MAX_LATENTS} latents, one for each of its steps")
    if len(set(steps)) != len(steps) or not all(1 <= step <= MAX_STEP for step in steps):
        raise ValueError(f"the steps of a recording must be unique and from 1 to {MAX_STEP}")
    first = latents[0]
    if len(first.shape) != 3 or any((latent.dtype, latent.shape) != (first.dtype, first.shape) for latent in latents):
        raise ValueError("the latents of a recording must have the same shape")
    size_bytes = math.prod(first.shape) * first.dtype.item_bytes
    if not size_bytes or any(memoryview(latent.data).nbytes != size_bytes for latent in latents):
        raise ValueError("the bytes of a recording's latent do not fit its shape")
    return first.dtype, first.shape
