"""LoRAs end to end: gateway, worker and store as real processes, through the client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bottega.client import Client
from tests.samples.lora_files import Part, base_shapes, kohya, save

_PROMPT = "a big red star on the left on a blue background"
_DRAW: dict[str, Any] = {"seed": 3, "num_inference_steps": 6}


@pytest.fixture(scope="module")
def client(client: Client, tmp_path_factory: pytest.TempPathFactory) -> Client:
    """Of the suite, whose store has `strong`."""
    client.add_lora("strong", _lora(tmp_path_factory.mktemp("loras"), seed=1))
    return client


def _lora(folder: Path, *, seed: int) -> Path:
    """Of all attention of the UNet and a text encoder, strong enough to be seen."""
    unet = [path for path in base_shapes("unet") if path.endswith(("to_q", "to_k", "to_v"))]
    text = [path for path in base_shapes("text_encoder") if path.endswith("q_proj")]
    parts = {("unet", path): Part(rank=4, alpha=2.0) for path in unet}
    parts |= {("text_encoder", path): Part(rank=2, alpha=1.0) for path in text}
    return save(kohya(parts, seed=seed)[0], folder / f"lora-{seed}.safetensors")


def test_a_picture_with_a_lora_is_another_one_and_the_same_again(client: Client) -> None:
    plain = client.generate(_PROMPT, **_DRAW)
    drawn = client.generate(_PROMPT, lora=[("strong", 0.8)], **_DRAW)
    assert drawn.pil().tobytes() != plain.pil().tobytes()
    (use,) = drawn.provenance.loras
    assert (use.name, use.digest, use.from_step) == ("strong", client.lora("strong").digest, 0)
    assert use.scale == pytest.approx(0.8)
    assert drawn.provenance.exact
    parameters = drawn.provenance.parameters.lora[0]
    assert (parameters.from_step, parameters.digest) == (0, use.digest)
    assert client.generate(_PROMPT, lora=["strong"], **_DRAW).pil().tobytes() != drawn.pil().tobytes()
    assert client.generate(_PROMPT, lora=[("strong", 0.8)], **_DRAW).data == drawn.data
    assert client.generate(_PROMPT, **_DRAW).data == plain.data, "nothing of a LoRA stays in the weights"
    assert client.generate(_PROMPT, lora=[("strong", 0.0)], **_DRAW).pil().tobytes() == plain.pil().tobytes()
