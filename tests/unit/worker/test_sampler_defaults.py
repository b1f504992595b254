"""From a caller's spec to what the engine draws: defaults of models and presets of few-step models are stock's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from bottega.engine.limits import EngineLimits
from bottega.gateway.jobs import specs
from bottega.model.schedulers import SamplerKind
from bottega.model_files.presets import PRESET_FILE
from bottega.v1 import engine_pb2, generation_pb2
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.worker_pb2 import RunAttemptRequest
from bottega.worker.engine.messages import ready_of
from bottega.worker.engine.orders import SAMPLERS, order_of
from tests.samples.model_folders import with_scheduler
from tests.samples.small_model import small_model
from tests.support.engines import make_engine
from tests.support.manual_engine import ManualEngine, load
from tests.support.stock import assert_close, latent_of, load_stock

SAID: dict[str, Any] = {"prompt": "a big red star", "num_inference_steps": 5, "width": 32, "height": 32, "seed": 3}


@pytest.mark.parametrize("name", ["EulerDiscreteScheduler", "DDIMScheduler"])
def test_a_sampler_draws_as_the_models_configuration_says_unless_the_request_does(tmp_path: Path, name: str) -> None:
    folder = with_scheduler(tmp_path / "model", name, use_karras_sigmas=True)
    engine, stock = make_engine(load(folder), EngineLimits()), load_stock(folder)
    config = stock.scheduler.config
    model = ready_of(engine).ready.model
    assert SAMPLERS[model.default_sampler].scheduler_class.__name__ == name
    for sampler in (generation_pb2.SAMPLER_UNSPECIFIED, generation_pb2.SAMPLER_EULER, generation_pb2.SAMPLER_DPMPP_2M):
        kind = SAMPLERS[sampler or model.default_sampler].scheduler_class
        for karras in (None, False, True):
            if karras is not None and not sampler:
                continue
            full = specs.complete(GenerationSpec(**SAID, sampler=sampler, use_karras_sigmas=karras), model)
            order = order_of(_start(full), engine.model)
            drawing = ManualEngine(engine).draw(order)
            overrides = {} if karras is None else {"use_karras_sigmas": karras}
            stock.scheduler = kind.from_config(config, **overrides)
            assert_close(drawing.latents[0], latent_of(stock, order.spec, width=32, height=32))
            # What the provenance says draws it again, whatever the model's default.
            said = GenerationSpec(**SAID, sampler=full.sampler)
            if full.HasField("use_karras_sigmas"):
                said.use_karras_sigmas = full.use_karras_sigmas
            assert order_of(_start(said), engine.model).spec == order.spec


def _start(spec: GenerationSpec) -> engine_pb2.EngineStart:
    return engine_pb2.EngineStart(request=RunAttemptRequest(spec=spec))


def test_a_gateway_that_does_not_know_the_models_samplers_leaves_them_to_the_worker(tmp_path: Path) -> None:
    model = load(with_scheduler(tmp_path / "model", "EulerDiscreteScheduler", use_karras_sigmas=True))
    assert order_of(_start(GenerationSpec(**SAID)), model).spec.use_karras_sigmas
    ddim = GenerationSpec(**SAID, sampler=generation_pb2.SAMPLER_DDIM)
    assert not order_of(_start(ddim), model).spec.use_karras_sigmas


def test_what_a_model_cannot_draw_with_is_told_with_the_reason(tmp_path: Path) -> None:
    folder = with_scheduler(tmp_path / "model", "EulerDiscreteScheduler", prediction_type="sample")
    model = ready_of(make_engine(load(folder), EngineLimits())).ready.model
    refused = {choice.sampler: choice.refused_because for choice in model.sampler_choices if choice.refused_because}
    edm = "it is for models that were trained with EDM's noise levels"
    of_noise = 'prediction_type must be "epsilon" or "v_prediction", not "sample"'
    assert refused == {
        generation_pb2.SAMPLER_EULER_ANCESTRAL: of_noise,
        generation_pb2.SAMPLER_EDM_EULER: edm,
        generation_pb2.SAMPLER_EDM_DPMPP_2M: edm,
        generation_pb2.SAMPLER_FLOW_MATCH_EULER: "it is for models that were trained with flow matching",
        generation_pb2.SAMPLER_PNDM: of_noise,
        generation_pb2.SAMPLER_KDPM2: of_noise,
        generation_pb2.SAMPLER_KDPM2_ANCESTRAL: of_noise,
    }


def test_that_a_model_edits_no_pictures_is_told_with_the_engines_reason() -> None:
    model = load(small_model())
    statistics = torch.zeros(1, 4, 1, 1), torch.ones(1, 4, 1, 1)
    told = {
        ready_of(make_engine(each, EngineLimits())).ready.model.edits_refused_because
        for each in (model, replace(model, decoder=replace(model.decoder, statistics=statistics)))
    }
    assert told == {
        "",
        f"model {model.name} cannot edit pictures, because its VAE has latents_mean and latents_std; use another",
    }


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
