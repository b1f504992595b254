"""LoRAs end to end: gateway, worker and store as real processes, through the client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bottega import kinds
from bottega.client import Client
from bottega.v1 import fleet_pb2
from bottega.v1.hosted_pb2 import HOSTED_STATE_APPLIED
from tests.samples.lora_files import Part, base_shapes, kohya, save
from tests.support.waiting import wait_until

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
    parameters = drawn.provenance.parameters.loras[0]
    assert (parameters.HasField("from_step"), parameters.digest) == (True, use.digest)
    assert client.generate(_PROMPT, lora=["strong"], **_DRAW).pil().tobytes() != drawn.pil().tobytes()
    assert client.generate(_PROMPT, lora=[("strong", 0.8)], **_DRAW).data == drawn.data
    assert client.generate(_PROMPT, **_DRAW).data == plain.data, "nothing of a LoRA stays in the weights"
    assert client.generate(_PROMPT, lora=[("strong", 0.0)], **_DRAW).pil().tobytes() == plain.pil().tobytes()


def test_a_worker_tells_the_fleet_what_is_in_its_weights_and_what_a_swap_takes(client: Client) -> None:
    client.generate(_PROMPT, lora=[("strong", 0.7)], seed=3, num_inference_steps=50)
    told = [(client.lora("strong").digest, 0.7)]
    wait_until(lambda: _in_weights(client) == told, "the set to be told")
    assert 0 < _load(client).switch_times[0].seconds < 1.0
    client.generate(_PROMPT, **_DRAW)
    wait_until(lambda: _in_weights(client) == [], "the weights to be told as untouched")


def _in_weights(client: Client) -> list[tuple[str, float]]:
    return [(lora.digest, lora.scale) for lora in _load(client).hosted if lora.state == HOSTED_STATE_APPLIED]


def _load(client: Client) -> fleet_pb2.Load:
    """Of the worker."""
    kind = kinds.WORKER
    (worker,) = (member for member in client.fleet().members if member.registration.kind == kind)
    return worker.load
