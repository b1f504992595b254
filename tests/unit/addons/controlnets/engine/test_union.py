"""ControlNet unions draw as in Diffusers' pipelines: one image, several, beside other nets, and mixed in one batch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ControlNetUnionModel
from torch import Tensor

from bottega.addons.controlnets.engine import ControlNetCache, find_controlnet, process_image, sessions
from bottega.controlnet import worker_link
from bottega.engine.job import EngineOrder
from bottega.engine.spec import ResolvedSpec
from bottega.errors import ControlNetUnusable
from bottega.model.model import Model
from bottega.model_files.controlnet_folder import check_controlnet
from bottega.transport import Limits
from tests.samples.controlnets import (
    control_image,
    control_spec,
    layout_of,
    random_controlnet,
    random_union,
    save,
    union_latent,
)
from tests.samples.small_model import small_model
from tests.support.controlled_engine import IMAGES, PLAIN, Desk, on
from tests.support.linked_servers import Offers, linked_server
from tests.support.manual_engine import ManualEngine
from tests.support.stock import assert_close, load_stock

SHORT = replace(PLAIN, num_inference_steps=3)
UNGUIDED = replace(SHORT, guidance_scale=1.0)


@pytest.fixture(scope="module")
def stock() -> Any:
    return load_stock(small_model())


@pytest.fixture(scope="module")
def unions(stock: Any) -> dict[str, ControlNetUnionModel]:
    return {"union": random_union(stock.unet, 1), "six": random_union(stock.unet, 2, modes=6)}


@pytest.fixture(scope="module")
def folders(stock: Any, unions: dict[str, ControlNetUnionModel], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return save({**unions, "edges": random_controlnet(stock.unet, 3)}, tmp_path_factory.mktemp("unions"))


def order(
    *images: tuple[str, int | None, float], key: str = "union", spec: ResolvedSpec = SHORT, **options: Any
) -> EngineOrder:
    """A job whose ControlNets are these: name, mode and scale of each image."""
    specs = tuple(
        control_spec(name, IMAGES[place], scale, control_mode=mode, **options)
        for place, (name, mode, scale) in enumerate(images)
    )
    return EngineOrder(key=key, spec=replace(spec, controlnets=specs), control_images=IMAGES[: len(images)])


def in_parts(job: EngineOrder, *windows: tuple[float, float]) -> EngineOrder:
    """The same job with another part of the steps for each image."""
    controls = tuple(
        replace(control, control_guidance_start=start, control_guidance_end=end)
        for control, (start, end) in zip(job.spec.controlnets, windows, strict=True)
    )
    return replace(job, spec=replace(job.spec, controlnets=controls))


CASES = {
    "one image in part of the steps": order(("union", 3, 1.0), control_guidance_end=0.6),
    # With guidance, guess mode of unions fails in Diffusers' pipeline.
    "one image, guess mode": order(("union", 6, 1.2), spec=UNGUIDED, guess_mode=True),
    "three images, two of one mode": order(("union", 7, 0.8), ("union", 1, 1.1), ("union", 1, 0.4)),
    "two images, guess mode": order(("union", 0, 0.8), ("union", 3, 0.5), spec=UNGUIDED, guess_mode=True),
    # No image is active in the second step.
    "two images in parts of the steps": in_parts(order(("union", 0, 0.8), ("union", 3, 0.5)), (0.0, 0.4), (0.6, 1.0)),
    "two unions": order(("union", 1, 0.8), ("six", 5, 0.7)),
}


def drawn(easel: ManualEngine, job: EngineOrder) -> Tensor:
    return easel.draw(job).latents[0]


@pytest.mark.parametrize("case", CASES)
def test_a_union_draws_as_the_stock_pipeline_does(
    easel: ManualEngine, stock: Any, unions: Mapping[str, ControlNetUnionModel], case: str
) -> None:
    job = CASES[case]
    assert_close(drawn(easel, job), union_latent(stock, unions, job.spec, job.control_images))


def test_jobs_with_different_modes_share_forward_passes_and_end_as_alone(
    easel: ManualEngine, stock: Any, unions: Mapping[str, ControlNetUnionModel], shelf: ControlNetCache
) -> None:
    jobs = [
        replace(order(("union", 1, 0.8), key="a"), control_images=IMAGES[:1]),
        replace(order(("union", 5, 1.3), key="b"), control_images=IMAGES[1:2]),
        order(("union", 0, 0.8), ("union", 3, 0.5), key="c"),
    ]
    passes: list[int] = []
    (net,) = shelf.borrow(["union"]).values.result(30)
    hook = net.network.register_forward_hook(lambda *_: passes.append(1))
    try:
        drawings = easel.run({0: jobs})
    finally:
        hook.remove()
    # Two jobs share passes and the one with two images has its own; only first steps may be apart.
    assert len(passes) <= 2 * SHORT.num_inference_steps + 1
    for job in jobs:
        assert_close(drawings[job.key].latents[0], union_latent(stock, unions, job.spec, job.control_images))


def test_images_that_begin_at_different_steps_are_sent_and_processed_once(
    model: Model,
    stock: Any,
    unions: Mapping[str, ControlNetUnionModel],
    folders: Mapping[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight images, a session for each of five spans of steps, and messages that hold the images once."""
    images = tuple(control_image(seed, 80, 112) for seed in range(8))
    specs = tuple(
        control_spec("union", image, 0.4, control_mode=mode, control_guidance_start=mode % 5 / 5)
        for mode, image in enumerate(images)
    )
    job = EngineOrder(key="union", spec=replace(PLAIN, controlnets=specs), control_images=images)
    processed: list[Tensor] = []

    def process(image: Tensor, *args: int) -> Tensor:
        processed.append(image)
        return process_image(image, *args)

    monkeypatch.setattr(sessions, "process_image", process)
    largest = 2 * sum(image.numel() for image in images)
    monkeypatch.setattr(worker_link, "_LIMITS", Limits(slots=8, slot_bytes=largest))
    with linked_server("server", folders, tmp_path) as server, Desk.closing():
        drawing = Desk(model, Offers(server)).draw(on(job, server))
    assert [use.control_mode for use in drawing.record.provenance.controlnets] == list(range(8))
    assert len(processed) == len(images)
    assert_close(drawing.latents[0], union_latent(stock, unions, job.spec, images))


def test_a_mode_that_does_not_fit_is_refused_with_the_list(easel: ManualEngine) -> None:
    modes = (
        "0 (openpose), 1 (depth), 2 (hed, pidi, scribble, ted), 3 (canny, lineart, anime_lineart, mlsd), 4 (normal), "
    )
    modes += "5 (segment)"
    for job, sentence in (
        (order(("six", None, 1.0)), f"ControlNet six is a union and needs a control_mode: {modes}"),
        (order(("six", 6, 1.0)), f"ControlNet six has no control_mode 6; it has {modes}"),
        (order(("edges", 1, 1.0)), "ControlNet edges is not a union and has no control_mode 1; leave it out. "),
    ):
        error = easel.draw(job).error
        assert isinstance(error, ControlNetUnusable)
        assert error.message.startswith(sentence)


def test_the_checker_knows_every_tensor_of_a_union(model: Model, folders: Mapping[str, Path]) -> None:
    for folder in folders.values():
        assert check_controlnet("net", folder, layout_of(model)) == ""


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_trans_channel": 64}, "num_trans_channel: must be 16, the first entry of block_out_channels, not 64"),
        ({"num_proj_channel": 64}, "num_proj_channel: must be 16, the first entry of block_out_channels, not 64"),
        ({"num_trans_head": 5}, "num_trans_head: must divide num_trans_channel, 16"),
        ({"num_control_type": 65}, "num_control_type: must be less than or equal to 64, not 65"),
        ({"addition_embed_type": None}, "addition_embed_type: must be 'text_time', not None"),
        (
            {"controlnet_conditioning_channel_order": "bgr"},
            "controlnet_conditioning_channel_order: must be 'rgb', not 'bgr'",
        ),
    ],
)
def test_a_unions_configuration_that_diffusers_cannot_build_is_refused(
    folders: Mapping[str, Path], tmp_path: Path, changes: dict[str, object], sentence: str
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads((folders["union"] / "config.json").read_text()) | changes)
    )
    assert check_controlnet("net", tmp_path, None) == f"ControlNet net cannot be used: config.json: {sentence}"


def test_a_union_that_calls_itself_a_controlnet_is_one(
    model: Model, folders: Mapping[str, Path], tmp_path: Path
) -> None:
    config = json.loads((folders["union"] / "config.json").read_text())
    shutil.copytree(folders["union"], tmp_path / "net")
    (tmp_path / "net" / "config.json").write_text(json.dumps(config | {"_class_name": "ControlNetModel"}))
    source = find_controlnet("net", tmp_path / "net", base=layout_of(model), dtype=torch.float32)
    assert source.modes == 8
