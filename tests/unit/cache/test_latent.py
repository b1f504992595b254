"""What of a recording is refused, and that a store has its own copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bottega.cache.latent import CheckedRecording, RecordedLatent, to_recording
from bottega.transport import DType
from bottega.v1.cache_pb2 import CacheRecording
from tests.support.cached_latents import KEY, LATENT_BYTES, MODEL, latent, vector


def _recording(**changed: Any) -> CheckedRecording:
    steps = changed.pop("steps", (5, 10))
    header = CacheRecording(key=changed.pop("key", KEY), model_hash=changed.pop("model", MODEL), steps=steps)
    given = {
        "embedding": vector(0),
        "picture": np.zeros((4, 5, 3), np.uint8),
        "latents": [latent(0, step) for step in (5, 10)],
    }
    return to_recording(header, **{**given, **changed})


def test_a_recording_is_a_copy() -> None:
    embedding, picture = vector(0), np.zeros((4, 5, 3), np.uint8)
    data = bytearray(latent(0, 5).data)
    shape = latent(0, 5).shape
    first = RecordedLatent(dtype=DType.FLOAT32, shape=shape, data=memoryview(data))
    made = _recording(embedding=embedding, picture=picture, latents=[first, latent(0, 10)])
    embedding[:], picture[:], data[:] = 7, 7, b"\7" * len(data)
    assert made.latents == {5: latent(0, 5).data, 10: latent(0, 10).data}
    assert (made.embedding == vector(0)).all()
    assert made.picture == bytes(60)
    assert (made.file_bytes, made.height, made.width) == (2 * LATENT_BYTES + 60, 4, 5)


@pytest.mark.parametrize(
    "changed",
    [
        {"key": "AB" * 32},
        {"model": "no hex"},
        {"steps": (5,)},
        {"steps": (5, 5)},
        {"steps": (0, 5)},
        {"steps": (5, 1000)},
        {"steps": (), "latents": []},
        {"steps": tuple(range(1, 10)), "latents": [latent(0, step) for step in range(1, 10)]},
        {"latents": [latent(0, 5), latent(0, 10, (4, 8, 9))]},
        {"latents": [latent(0, 5, (4, 8)), latent(0, 10, (4, 8))]},
        {"latents": [RecordedLatent(dtype=DType.FLOAT16, shape=(4, 8, 8), data=latent(0, 5).data)] * 2},
        {"picture": np.zeros((4, 5), np.uint8)},
        {"picture": np.zeros((4, 5, 4), np.uint8)},
        {"picture": np.zeros((4, 257, 3), np.uint8)},
        {"picture": np.zeros((0, 5, 3), np.uint8)},
        {"picture": np.zeros((4, 5, 3), np.float32)},
        {"embedding": np.zeros(64, np.float32)},
        {"embedding": np.full(64, np.inf, np.float32)},
        {"embedding": np.full(64, 1e25, np.float32)},
        {"embedding": np.full(64, 1e-25, np.float32)},
        {"embedding": np.ones(4097, np.float32)},
        {"embedding": np.ones((2, 32), np.float32)},
    ],
)
def test_what_breaks_a_rule_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"key|recording|recorded|embedding"):
        _recording(**changed)
