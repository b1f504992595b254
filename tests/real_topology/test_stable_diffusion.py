"""Models at their own size, with random weights: folders with an fp16 variant alone, and single files.

A picture of 256x256 in bfloat16 equals stock's within 1 level, and loading takes little memory beside the weights. Each
model of Stable Diffusion takes 3 to 6 GB of disk, 8 GB of memory and some minutes, and SDXL twice as much.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline

from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.spec import ResolvedSpec
from bottega.model.loading import load_model
from bottega.worker.conversion.folder import convert_file
from tests.samples.engine_loras import LorasByHand, lora_spec
from tests.samples.lora_files import imported_layers
from tests.samples.published import Layout, write_stable_diffusion
from tests.samples.single_files import TRUE_SHAPES, write_single_file
from tests.samples.stable_diffusion_configs import sd15, sd21
from tests.support.engines import make_engine
from tests.support.manual_engine import ManualEngine
from tests.support.stock import Pixels, pixels_of

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1800)]

GIB = 1 << 30
THREADS = 2
PROMPT = "a big red star on the left on a blue background"
MODELS: Mapping[str, Callable[[], Mapping[str, dict[str, Any]]]] = {"1.5": sd15, "2.1": sd21}

Made = TypeVar("Made")


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bottega-real-topology-") as made:
        path = Path(made) / f"stable-diffusion-{request.param}"
        in_process(_write, path, request.param)
        yield path


def test_a_picture_in_half_precision_is_stocks_and_loading_is_lean(folder: Path) -> None:
    drawn, peak_bytes, weights_bytes = in_process(draw, folder)
    _check(drawn, in_process(_draw_stock, folder), peak_bytes, weights_bytes)


@pytest.mark.parametrize("family", TRUE_SHAPES)
def test_a_picture_of_a_single_file_is_that_of_from_single_file(family: str) -> None:
    with tempfile.TemporaryDirectory(prefix="bottega-real-topology-") as made:
        file, converted = Path(made, "model.safetensors"), Path(made, "model")
        in_process(_write_file, file, family)
        in_process(_convert, file, converted)
        drawn, peak_bytes, weights_bytes = in_process(draw, converted)
        _check(drawn, in_process(_draw_stock_file, file, converted, family), peak_bytes, weights_bytes)


def _check(drawn: Pixels, stock: Pixels, peak_bytes: int, weights_bytes: int) -> None:
    off = np.abs(drawn.astype(int) - stock)
    assert stock.std() > 1  # levels: the picture is not of one colour
    assert off.max() <= 1
    assert peak_bytes <= 1.15 * weights_bytes + 2 * GIB


def _write_file(file: Path, family: str) -> None:
    write_single_file(file, family, shape=TRUE_SHAPES[family], dtype=torch.bfloat16)


def _convert(file: Path, folder: Path) -> None:
    convert_file(file, folder)


def _write(folder: Path, name: str) -> None:
    write_stable_diffusion(folder, MODELS[name](), Layout(variants=("fp16",)))


def draw(folder: Path, lora: Path | None = None) -> tuple[Pixels, int, int]:
    """Return a picture of the suite's engine, the peak of resident memory when it was loaded, and its weights' size.

    Args:
        folder: The model.
        lora: File of a LoRA with which it draws; None draws without one.
    """
    torch.set_num_threads(THREADS)
    model = load_model(folder, name="it", device=torch.device("cpu"), dtype=torch.bfloat16)
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak_bytes = int(status.partition("VmHWM:")[2].split()[0]) << 10
    spec = ResolvedSpec(
        prompt=PROMPT,
        num_inference_steps=2,
        guidance_scale=model.defaults.guidance_scale,
        sampler=model.defaults.sampler,
        width=256,
        height=256,
        seed=7,
        loras=(lora_spec("it"),) if lora else (),
    )
    source = LorasByHand.of({"it": imported_layers(folder, lora)}) if lora else None
    engine = make_engine(model, EngineLimits(), loras=source)
    (pixels,) = ManualEngine(engine).draw(EngineOrder(key="it", spec=spec)).pixels
    return pixels, peak_bytes, sum(file.stat().st_size for file in folder.glob("*/*.safetensors"))


def _draw_stock(folder: Path) -> Pixels:
    torch.set_num_threads(THREADS)
    pipeline = StableDiffusionPipeline.from_pretrained(
        folder,
        variant="fp16",
        dtype=torch.bfloat16,
        use_safetensors=True,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    return stock_picture(pipeline)


def _draw_stock_file(file: Path, converted: Path, family: str) -> Pixels:
    """Return stock's picture of a single file. The folder gives the configurations, which stock would download."""
    torch.set_num_threads(THREADS)
    kind: Any = StableDiffusionPipeline
    without: dict[str, Any] = {"safety_checker": None}
    if family == "sdxl":
        kind, without = StableDiffusionXLPipeline, {"add_watermarker": False}
    pipeline = kind.from_single_file(
        file, config=str(converted), local_files_only=True, dtype=torch.bfloat16, **without
    )
    return stock_picture(pipeline)


def stock_picture(pipeline: Any) -> Pixels:
    generator = torch.Generator("cpu").manual_seed(7)
    options = {"num_inference_steps": 2, "width": 256, "height": 256}
    return pixels_of(pipeline(PROMPT, generator=generator, **options).images[0])


def in_process(function: Callable[..., Made], *arguments: object) -> Made:
    """Call it in a process of its own, whose memory goes with it."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()
