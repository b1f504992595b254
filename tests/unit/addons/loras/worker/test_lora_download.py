"""A LoRA that comes whole: its text can be read at once, the rest when it has been checked; none of it is copied."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator

import pytest
import torch

from bottega.addons.loras.engine import LoraRef, WholeLayer
from bottega.addons.loras.wire import canonical
from bottega.addons.loras.wire.canonical import ModuleWeights, TensorData
from bottega.addons.loras.worker.download import LoraDownload
from bottega.errors import DataLoss
from bottega.transport.memory import address, received_file
from tests.samples.lora_files import low_rank
from tests.support.shared_loras import SMALL, canonical_file
from tests.support.transport_backends import mapped_files, sealed_file


@pytest.fixture
def data() -> bytes:
    return canonical_file(SMALL, odd=True)


@pytest.fixture
def file(data: bytes) -> Iterator[memoryview]:
    with sealed_file(data) as sealed:
        yield received_file(sealed.descriptor, sealed.size_bytes)


def _download(digest: str, dtype: torch.dtype = torch.float32) -> LoraDownload:
    return LoraDownload(LoraRef(name="ink", digest=digest), device=torch.device("cpu"), dtype=dtype)


def _within(tensor: torch.Tensor, file: memoryview) -> bool:
    return 0 <= tensor.data_ptr() - address(file) < len(file)


def test_the_text_is_there_before_the_rest_is_checked(data: bytes, file: memoryview) -> None:
    download = _download(hashlib.sha256(data).hexdigest())
    download.take_whole(file)
    assert (download.text_ready, download.ready) == (True, False)
    assert list(download.layers("text_encoder")) == ["layers.0.q_proj"]
    with pytest.raises(KeyError):
        download.layers("unet")
    download.check()
    assert download.ready
    assert len(download.layers("unet")) == 4


def test_what_does_not_begin_where_the_processor_wants_it_is_moved_and_the_rest_is_not(file: memoryview) -> None:
    """The UNet's section is behind an odd number of half-precision items here."""
    download = _download(hashlib.sha256(file).hexdigest(), torch.float16)
    download.take_whole(file)
    (layer,) = low_rank(download.layers("text_encoder")).values()
    assert _within(layer.down, file)
    download = _download(hashlib.sha256(file).hexdigest())
    download.take_whole(file)
    download.check()
    for layer in low_rank(download.layers("unet")).values():
        assert layer.down.data_ptr() % 4 == layer.up.data_ptr() % 4 == 0
        assert not _within(layer.down, file)


def test_weights_of_another_digest_are_never_there(data: bytes, file: memoryview) -> None:
    download = _download("0" * 64)
    download.take_whole(file)
    with pytest.raises(DataLoss, match="ink"):
        download.check()
    assert not download.ready
    with pytest.raises(KeyError):
        download.layers("unet")


def test_the_memory_is_let_go_with_the_last_layer_that_looks_at_it(data: bytes) -> None:
    before = mapped_files()
    with sealed_file(data) as sealed:
        download = _download(hashlib.sha256(data).hexdigest(), torch.float16)
        download.take_whole(received_file(sealed.descriptor, sealed.size_bytes))
        download.check()
    text = download.layers("text_encoder")
    download.restart()
    assert mapped_files() == before + 1
    del download, text
    assert mapped_files() == before


_LOHA = {"down": (2, 8), "up": (8, 2), "down2": (2, 8), "up2": (8, 2)}


def test_layers_without_a_low_rank_form_keep_their_element_type() -> None:
    """They are expanded in single precision, and rounded once."""
    weights = TensorData(dtype="F32", shape=(6, 8), data=bytes(192))
    loha = {part: TensorData(dtype="F16", shape=shape, data=bytes(32)) for part, shape in _LOHA.items()}
    modules = [
        ModuleWeights(component="unet", path="a", scale=0.5, parts=loha),
        ModuleWeights(component="unet", path="b", scale=1.0, parts={"full": weights}),
    ]
    out = io.BytesIO()
    canonical.write(out, modules)
    data = out.getvalue()
    with sealed_file(data) as sealed:
        file = received_file(sealed.descriptor, sealed.size_bytes)
    download = _download(hashlib.sha256(data).hexdigest(), torch.bfloat16)
    download.take_whole(file)
    download.check()
    layers = download.layers("unet")
    found = {path: layer.parts for path, layer in layers.items() if isinstance(layer, WholeLayer)}
    assert {path: {part.dtype for part in parts.values()} for path, parts in found.items()} == {
        "a": {torch.float16},
        "b": {torch.float32},
    }
    assert layers["a"].scale == 0.5
    assert download.size_bytes == 4 * 32 + 192


def test_layers_of_a_transformer_and_t5_are_those_of_the_file() -> None:
    """Those of T5 are there with the text encoders', before the rest is checked."""
    weights = TensorData(dtype="F32", shape=(6, 8), data=bytes(192))
    out, parts = io.BytesIO(), {"full": weights}
    modules = [
        ModuleWeights(component=component, path=component, scale=1.0, parts=parts)
        for component in ("transformer", "text_encoder_3")
    ]
    canonical.write(out, modules)
    with sealed_file(out.getvalue()) as sealed:
        file = received_file(sealed.descriptor, sealed.size_bytes)
    download = _download(hashlib.sha256(out.getvalue()).hexdigest())
    download.take_whole(file)
    assert list(download.layers("text_encoder_3")) == ["text_encoder_3"]
    assert download.text_ready
    download.check()
    assert list(download.layers("transformer")) == ["transformer"]
    assert not download.layers("unet")
