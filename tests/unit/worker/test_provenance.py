"""What the engine says of a job, as its worker's front is told."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from bottega.engine.acceleration.acceleration import AccelerationResult
from bottega.engine.encode import encode_all_prompts
from bottega.engine.events import EngineRecord, JobFinished, JobKept
from bottega.engine.limits import EngineLimits
from bottega.engine.spec import ResolvedSpec
from bottega.model.loading import load_model
from bottega.model.model import Model
from bottega.model.text_encoders import TextCache, TextEncoderSettings
from bottega.v1.engine_pb2 import EngineBeat, EngineStart
from bottega.v1.generation_pb2 import FIDELITY_FAST, GenerationSpec, Provenance, Techniques
from bottega.v1.worker_pb2 import RunAttemptRequest
from bottega.worker.engine.messages import add_prompt_metrics, event_of, ready_of
from bottega.worker.engine.orders import order_of
from tests.samples.small_model import SIZE, small_model
from tests.support.engines import make_engine
from tests.support.manual_engine import load


@pytest.fixture(scope="module")
def model() -> Model:
    return load(small_model())


def test_accelerations_that_were_kept_are_named_and_all_are_told_of_at_the_start(model: Model) -> None:
    engine = make_engine(model, EngineLimits())
    engine.accelerations = [
        AccelerationResult(name="kept", kept=True, speedup=1.5, difference=0.001, tolerance=0.02),
        AccelerationResult(name="wrong", kept=False, difference=math.inf, tolerance=0.02, reason="it differs by inf"),
    ]
    record = EngineRecord(provenance=Provenance(), seconds={})
    event = event_of(JobFinished(key=("job", 1), record=record), engine)
    assert list(event.done.provenance.accelerations) == ["kept"]
    told = ready_of(engine).ready.accelerations
    assert [(each.name, each.kept, each.speedup, each.difference, each.reason) for each in told] == [
        ("kept", True, 1.5, 0.001, ""),
        ("wrong", False, 0.0, 0.0, "it differs by inf"),
    ]


def test_a_picture_that_was_not_decoded_as_stock_decodes_is_not_exact(model: Model) -> None:
    engine = make_engine(model, EngineLimits())
    record = EngineRecord(provenance=Provenance(vae_dtype="float32"), seconds={})
    whole = event_of(JobFinished(key=("job", 1), record=record), engine).done.provenance
    assert (whole.exact, whole.vae_tiled, whole.vae_dtype) == (True, False, "float32")
    tiled_record = EngineRecord(provenance=Provenance(vae_tiled=True), seconds={}, decoded_as_stock=False)
    tiled = event_of(JobFinished(key=("job", 1), record=tiled_record), engine).done.provenance
    assert (tiled.exact, tiled.vae_tiled) == (False, True)


def test_a_picture_of_a_text_encoder_in_another_dtype_is_not_exact() -> None:
    text = {"text_encoder": TextEncoderSettings(dtype=torch.bfloat16)}
    model = load_model(small_model(), name="m", device=torch.device("cpu"), dtype=torch.float32, text=text)
    record = EngineRecord(provenance=Provenance(), seconds={})
    event = event_of(JobFinished(key=("job", 1), record=record), make_engine(model, EngineLimits()))
    assert not event.done.provenance.exact


def test_a_beat_has_the_counts_of_the_cache_of_prompts(model: Model) -> None:
    cached, beat = replace(model, prompt_cache=TextCache(1 << 20)), EngineBeat()
    for _ in range(2):
        encode_all_prompts(cached, ResolvedSpec(prompt="a star", guidance_scale=1.0))
    add_prompt_metrics(beat, cached)
    values = {metric.name.removeprefix("bottega_worker_prompt_cache_"): metric.value for metric in beat.metrics}
    assert values == {"hits": 1, "misses": 1, "bytes": cached.prompt_cache.used_bytes}


def test_shared_turns_in_half_precision_make_a_picture_approximate(model: Model) -> None:
    record = EngineRecord(provenance=Provenance(), seconds={}, shared_in_half_precision=True)
    assert record.exact, "nothing was approximated, so that the record's latents may be cached"
    event = event_of(JobFinished(key=("job", 1), record=record), make_engine(model, EngineLimits()))
    provenance = event.done.provenance
    assert (provenance.exact, provenance.shared_in_half_precision) == (False, True)
    for name in ("exact", "decoded_as_stock", "denoised_as_stock"):
        cause: dict[str, Any] = {name: False}
        otherwise = replace(record, **cause)
        event = event_of(JobFinished(key=("job", 1), record=otherwise), make_engine(model, EngineLimits()))
        provenance = event.done.provenance
        assert (provenance.exact, provenance.shared_in_half_precision) == (False, False), "it has another cause, too"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_request_computes_alone_only_in_half_precision(dtype: torch.dtype) -> None:
    half = load(small_model(), dtype=dtype)
    spec = GenerationSpec(prompt="a star", num_inference_steps=2, width=SIZE, height=SIZE)
    for wanted, shares in ((None, True), (True, True), (False, dtype == torch.float32)):
        start = EngineStart(request=RunAttemptRequest(spec=spec))
        if wanted is not None:
            start.request.spec.techniques.shared_turns = wanted
        assert order_of(start, half).shared_turns == shares


@pytest.mark.parametrize("said", [None, False, True])
def test_blocks_of_earlier_steps_are_reused_only_where_the_request_says_so(model: Model, *, said: bool | None) -> None:
    techniques = Techniques(step_caching=said)
    spec = GenerationSpec(prompt="a star", width=SIZE, height=SIZE, fidelity=FIDELITY_FAST, techniques=techniques)
    order = order_of(EngineStart(request=RunAttemptRequest(spec=spec)), model)
    assert order.spec.step_caching is bool(said)


def test_what_is_kept_comes_back_by_kind_and_is_ignored_if_damaged(model: Model) -> None:
    spec = GenerationSpec(prompt="a star", num_inference_steps=2, width=SIZE, height=SIZE)
    by_kind = {"a": b"1", "b": b"2"}
    event = event_of(JobKept(key=("job", 1), index=0, by_kind=by_kind), make_engine(model, EngineLimits()))
    for data, expected in ((event.kept.kept, by_kind), (b"\xff", {}), (b"", {})):
        assert order_of(EngineStart(request=RunAttemptRequest(spec=spec, kept=data)), model).kept == expected
