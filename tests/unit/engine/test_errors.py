"""What goes wrong with one job stays with it: the others' images are right, and nothing of it is left behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bottega.engine.events import ImageDrawn, JobFinished
from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.request import Request
from bottega.engine.spec import ResolvedSpec
from bottega.errors import InternalError, NotFinite, TooLarge
from bottega.model.model import Model
from bottega.model.schedulers import SamplerKind
from tests.samples.small_model import SIZE
from tests.support.engines import make_engine
from tests.support.manual_engine import Drawing, ManualEngine
from tests.support.stock import Pixels, Stock, assert_same_image

SPEC = ResolvedSpec(
    prompt="a big red star on the left on a blue background", num_inference_steps=6, width=SIZE, height=SIZE, seed=15
)
# Unlike each other in all but their size, so that they can share groups.
SPECS = (
    SPEC,
    replace(SPEC, seed=16, sampler=SamplerKind.DPMPP_2M, num_inference_steps=8),
    replace(SPEC, seed=17, sampler=SamplerKind.EULER_ANCESTRAL, prompt="a small green circle on a white background"),
)
# All that are there share every turn.
TOGETHER = EngineLimits(max_wait_turns=0)


@pytest.fixture(scope="module")
def right(model: Model) -> dict[ResolvedSpec, Pixels]:
    """The images, by their specs, when nothing goes wrong and nobody else is there."""
    easel = ManualEngine(make_engine(model, EngineLimits()))
    return {spec: easel.draw(EngineOrder(key=0, spec=spec)).pixels[0] for spec in SPECS}


@pytest.fixture
def easel(model: Model) -> ManualEngine:
    return ManualEngine(make_engine(model, TOGETHER))


@contextmanager
def failing(layer: nn.Module, why: Callable[[Tensor], Exception | None]) -> Iterator[None]:
    """The layer raises what `why` says of its input. The network's first one sees [rows, channels, height, width]."""

    def check(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        error = why(inputs[0])
        if error is not None:
            raise error

    handle = layer.register_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


def submit_all(easel: ManualEngine) -> list[Drawing]:
    return [easel.submit(EngineOrder(key=key, spec=spec)) for key, spec in enumerate(SPECS)]


def assert_right(drawing: Drawing, right: dict[ResolvedSpec, Pixels]) -> None:
    assert drawing.job is not None
    assert_same_image(drawing.pixels[0], right[drawing.job.order.spec])
    assert isinstance(drawing.events[-1], JobFinished)


def test_a_picture_of_too_many_pixels_is_refused_with_the_limit(model: Model) -> None:
    engine = make_engine(model, EngineLimits(max_pixels=SIZE * SIZE))
    with pytest.raises(TooLarge, match=r"96x32 are 3072 pixels; .* at most 1024 \(max_pixels\)") as caught:
        engine.submit(EngineOrder(key=0, spec=replace(SPEC, width=96)))
    assert caught.value.metadata == {"limit": "max_pixels", "max_pixels": "1024"}
    assert not engine.busy
    engine.submit(EngineOrder(key=0, spec=SPEC))
    assert engine.busy


def test_a_job_that_overflows_does_not_touch_those_beside_it(
    easel: ManualEngine, right: dict[ResolvedSpec, Pixels]
) -> None:
    good = submit_all(easel)
    bad = easel.submit(EngineOrder(key="bad", spec=replace(SPEC, guidance_scale=3e38)))
    easel.run()
    assert isinstance(bad.error, NotFinite)
    assert bad.error.message.endswith("another seed or more steps may help")
    assert not bad.all(ImageDrawn)
    for drawing in good:
        assert_right(drawing, right)
        assert drawing.record.provenance.mean_group_requests > 1


def test_a_request_that_fails_alone_ends_and_the_others_finish(
    model: Model, easel: ManualEngine, right: dict[ResolvedSpec, Pixels], caplog: pytest.LogCaptureFixture
) -> None:
    good = submit_all(easel)
    bad = easel.submit(EngineOrder(key="bad", spec=replace(SPEC, seed=99)))

    def is_bad(sample: Tensor) -> Exception | None:
        """From its third step on, whoever shares a turn with it goes down with it."""
        if bad.job is None or bad.job.steps_done < 2 or bad.ended:
            return None
        bad_sample = bad.job.requests[0].rows()[0].sample
        return RuntimeError("a secret of the engine") if any(torch.equal(row, bad_sample) for row in sample) else None

    with failing(model.backbone.network.conv_in, is_bad):
        easel.run()
    assert isinstance(bad.error, InternalError)
    assert "secret" not in bad.error.message
    assert "secret" in caplog.text
    for drawing in good:
        assert_right(drawing, right)


def requests_of(drawing: Drawing) -> list[weakref.ref[Request]]:
    """Of a started job, without keeping them."""
    assert drawing.job is not None
    return [weakref.ref(request) for request in drawing.job.requests]


def assert_nothing_left(easel: ManualEngine, key: str, requests: list[weakref.ref[Request]]) -> None:
    """Of a cancelled job: the engine does not count it, show it or keep its tensors."""
    del easel.drawings[key]
    gc.collect()
    assert key not in easel.engine.jobs
    assert key not in dict(easel.engine.evaluations_left())
    assert [request() for request in requests] == [None] * len(requests)


@pytest.mark.parametrize("when", ["in the queue", "between its steps", "between its images"])
def test_a_cancelled_job_leaves_nothing_behind_and_the_others_alone(
    easel: ManualEngine, right: dict[ResolvedSpec, Pixels], when: str
) -> None:
    others = submit_all(easel)
    unlucky = easel.submit(EngineOrder(key="unlucky", spec=replace(SPEC, num_images=3, seed=50)))
    reached: dict[str, Callable[[], object]] = {
        "in the queue": lambda: not unlucky.events,
        "between its steps": lambda: unlucky.job is not None and unlucky.job.steps_done > 3,
        "between its images": lambda: unlucky.all(ImageDrawn),
    }
    while not reached[when]():
        easel.turn()
    requests = requests_of(unlucky) if unlucky.job is not None else []
    unlucky.job = None
    for _ in range(2):
        easel.engine.cancel("unlucky")
    easel.turn()
    assert_nothing_left(easel, "unlucky", requests)
    easel.run()
    assert len(unlucky.all(ImageDrawn)) == (1 if when == "between its images" else 0)
    for drawing in others:
        assert_right(drawing, right)


def test_a_finished_job_leaves_nothing_behind(easel: ManualEngine) -> None:
    easel.draw(EngineOrder(key="done", spec=SPEC))
    requests = requests_of(easel.drawings["done"])
    assert not easel.engine.busy
    assert_nothing_left(easel, "done", requests)


WORDS = 25 * [*SPEC.prompt.split(), "."]


@pytest.mark.parametrize(
    "words",
    [{"prompt": WORDS, "negative_prompt": WORDS[::-1]}, {"prompt_2": 300 * ["star"]}],
    ids=["both prompts", "the second encoder's own"],
)
def test_prompts_of_300_words_are_cut_as_in_diffusers_and_the_record_says_so(
    easel: ManualEngine, stock: Stock, words: dict[str, list[str]]
) -> None:
    """The tokenizers take 24 tokens, two of which mark beginning and end; each of these words is one."""
    texts: dict[str, Any] = {field: " ".join(each) for field, each in words.items()}
    spec = replace(SPEC, num_inference_steps=3, **texts)
    drawing = easel.draw(EngineOrder(key=0, spec=spec))
    assert_same_image(drawing.pixels[0], stock.reference(spec).pixels)
    cut = {cut.field: (cut.text.split(), tuple(cut.encoders)) for cut in drawing.record.provenance.truncations}
    encoders = ("text_encoder_2",) if "prompt_2" in words else ("text_encoder", "text_encoder_2")
    assert cut == {field: (each[22:], encoders) for field, each in words.items()}
