"""Few-step models: their presets make a request that says nothing one row a step, and the picture is stock's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bottega.engine.limits import EngineLimits
from bottega.gateway.jobs import specs
from bottega.model.schedulers import SamplerKind
from bottega.model_files.presets import PRESET_FILE
from bottega.v1 import engine_pb2
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.worker_pb2 import RunAttemptRequest
from bottega.worker.engine.messages import ready_of
from bottega.worker.engine.orders import order_of
from tests.samples.model_folders import with_scheduler
from tests.support.engines import make_engine
from tests.support.manual_engine import ManualEngine, load
from tests.support.stock import assert_close, latent_of, load_stock


class Folder(NamedTuple):
    """A folder as people publish it, its `bottega.json`, and the sampler that draws."""

    class_name: str
    config: dict[str, Any]
    preset: dict[str, Any]
    sampler: SamplerKind


TRAILING = {"timestep_spacing": "trailing"}
FOLDERS = {
    "Turbo": Folder(
        "EulerAncestralDiscreteScheduler",
        TRAILING,
        {"num_inference_steps": 1, "guidance_scale": 0.0},
        SamplerKind.EULER_ANCESTRAL,
    ),
    "Lightning": Folder(
        "EulerDiscreteScheduler", {}, {"num_inference_steps": 4, "guidance_scale": 0.0, **TRAILING}, SamplerKind.EULER
    ),
    "LCM": Folder("LCMScheduler", {}, {"num_inference_steps": 4, "guidance_scale": 1.0}, SamplerKind.LCM),
    "LCM-LoRA merged into a plain model": Folder(
        "EulerDiscreteScheduler",
        {},
        {"num_inference_steps": 4, "guidance_scale": 1.0, "sampler": "lcm"},
        SamplerKind.LCM,
    ),
    "Hyper-SD": Folder(
        "DDIMScheduler", {}, {"num_inference_steps": 2, "guidance_scale": 0.0, "sampler": "tcd"}, SamplerKind.TCD
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_request_that_says_nothing_is_drawn_as_the_preset_says(tmp_path: Path, name: str) -> None:
    folder = FOLDERS[name]
    path = with_scheduler(tmp_path / "model", folder.class_name, **folder.config)
    (path / PRESET_FILE).write_text(json.dumps(folder.preset))
    engine = make_engine(load(path), EngineLimits())
    said = GenerationSpec(prompt="a big red star", width=32, height=32, seed=3)
    full = specs.complete(said, ready_of(engine).ready.model)
    order = order_of(engine_pb2.EngineStart(request=RunAttemptRequest(spec=full)), engine.model)
    spec = order.spec
    assert (spec.num_inference_steps, spec.guidance_scale) == tuple(folder.preset.values())[:2]
    assert spec.sampler is folder.sampler
    drawing = ManualEngine(engine).draw(order)
    assert {rows for _, rows, _ in engine.step_times.entries()} == {1}
    stock = load_stock(path)
    spacing = {key: value for key, value in folder.preset.items() if key in TRAILING}
    stock.scheduler = folder.sampler.scheduler_class.from_config(stock.scheduler.config, **spacing)
    assert_close(drawing.latents[0], latent_of(stock, spec, width=32, height=32))
