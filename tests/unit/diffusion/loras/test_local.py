"""LoRAs from canonical files: what is read of one, and what each that cannot be used is called."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bottega.diffusion.loras import LoraHandle, LoraRef
from bottega.diffusion.loras.local import LocalLoras
from bottega.errors import BadLora, BottegaError, DataLoss, LoraNotFound
from bottega.lora.canonical import ModuleWeights, TensorData, write

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
WAIT_S = 10.0


def tensor(dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DTYPES[dtype])


def weights(each: torch.Tensor, dtype: str) -> TensorData:
    return TensorData(dtype=dtype, shape=tuple(each.shape), data=each.view(torch.uint8).numpy().tobytes())


LAYERS = {
    ("text_encoder_2", "layers.0.q_proj"): ("F32", (3, 8), (5, 3), 0.5),
    ("unet", "mid.to_q"): ("BF16", (2, 6), (7, 2), 1.0),
    ("unet", "down.conv"): ("F16", (4, 3, 3, 3), (9, 4, 1, 1), 2.0),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    modules = [
        ModuleWeights(
            component=component,
            path=path,
            scale=scale,
            down=weights(tensor(dtype, down, 1), dtype),
            up=weights(tensor(dtype, up, 2), dtype),
        )
        for (component, path), (dtype, down, up, scale) in LAYERS.items()
    ]
    path = tmp_path / "a.lora"
    with path.open("wb") as file:
        write(file, modules)
    return path


@pytest.fixture
def files() -> dict[str, Path]:
    return {}


@pytest.fixture
def loras(files: dict[str, Path]) -> Iterator[LocalLoras]:
    with LocalLoras(files) as loras:
        yield loras


def ended(loras: LocalLoras, digest: str) -> LoraHandle:
    """A handle of which nothing more will come."""
    handle = loras.begin(LoraRef(name="a", digest=digest))
    loras.settle([handle], WAIT_S)
    return handle


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_file_is_read_as_it_was_written(loras: LocalLoras, files: dict[str, Path], file: Path) -> None:
    files[digest_of(file)] = file
    handle = ended(loras, digest_of(file))
    assert handle.text_ready
    assert handle.ready
    assert 0 < handle.load_s < WAIT_S
    for (component, path), (dtype, down, up, scale) in LAYERS.items():
        layer = handle.layers(component)[path]
        assert torch.equal(layer.down, tensor(dtype, down, 1))
        assert torch.equal(layer.up, tensor(dtype, up, 2))
        assert layer.scale == scale
    assert handle.layers("text_encoder") == {}
    loras.close([handle])


def error_of(handle: LoraHandle) -> BottegaError:
    with pytest.raises(BottegaError) as caught:
        _ = handle.ready
    return caught.value


def test_what_cannot_be_used_is_called_by_its_name(
    loras: LocalLoras, files: dict[str, Path], file: Path, tmp_path: Path
) -> None:
    assert isinstance(error_of(ended(loras, "none")), LoraNotFound)
    files["other"] = file
    assert isinstance(error_of(ended(loras, "other")), DataLoss)
    cut = tmp_path / "cut.lora"
    cut.write_bytes(file.read_bytes()[:-1])
    files[digest_of(cut)] = cut
    assert isinstance(error_of(ended(loras, digest_of(cut))), BadLora)
