"""ControlNets that Stable Diffusion 3 cannot use, or not so, are refused with the reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bottega.addons.controlnets.engine import ControlSession, base_layout, find_controlnet, load_controlnet
from bottega.addons.controlnets.engine.messages import (
    OpenedSession,
    Opening,
    SessionSpec,
    open_message,
    opened_message,
    read_opened,
    read_opening,
)
from bottega.addons.controlnets.engine.provider import ControlInput
from bottega.device_links.tensor_messages import TensorMessage, message_of
from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits, check_drawable
from bottega.engine.spec import ResolvedSpec
from bottega.errors import ControlNetUnusable, InvalidRequest
from bottega.model.backbone import POOLED
from bottega.model.model import Model
from bottega.model.rows import Embeds, Half
from bottega.model.schedulers import SamplerKind
from tests.samples.controlnets import control_image, control_spec, layout_of, random_controlnet, save
from tests.samples.family_models import SIZE, control_networks, family_model
from tests.samples.sd3_controlnets import sd3_controlnet
from tests.support.controlled_engine import Desk, on
from tests.support.linked_servers import Offers, linked_server
from tests.support.manual_engine import load

IMAGE = control_image(1)
SPEC = ResolvedSpec(
    prompt="a star", num_inference_steps=1, width=SIZE, height=SIZE, sampler=SamplerKind.FLOW_MATCH_EULER
)
ORDER = EngineOrder(key="it", spec=replace(SPEC, controlnets=(control_spec("edges", IMAGE),)), control_images=(IMAGE,))


@pytest.fixture(scope="module")
def model() -> Model:
    return load(family_model("SD 3"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save({"edges": control_networks("SD 3")[0]}, tmp_path_factory.mktemp("nets"))["edges"]


MISFITS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "another width": (
        {"num_attention_heads": 8, "caption_projection_dim": 64},
        r"its tokens are 64 wide, the model's 32 \(attention_head_dim, num_attention_heads\)",
    ),
    "more residuals than blocks": ({"num_layers": 4}, r"it has 4 residuals, the model 3 blocks \(num_layers\)"),
    "another prompt": ({"joint_attention_dim": 64}, r"its context_width is 64, the model's 96 \(joint_attention_dim\)"),
    "another latent": ({"in_channels": 4, "out_channels": 4}, "its latent_channels is 4, the model's 16"),
    "of an inpainting model": ({"extra_conditioning_channels": 1}, "it is for inpainting, and reads a mask"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_refused_with_the_fields_that_differ(model: Model, tmp_path: Path, case: str) -> None:
    options, why = MISFITS[case]
    folder = save({"net": sd3_controlnet(**{"num_layers": 1, **options})}, tmp_path)["net"]
    with pytest.raises(ControlNetUnusable, match=rf"ControlNet net .*{why}"):
        find_controlnet("net", folder, base=layout_of(model), dtype=torch.float32)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_layers": 0}, "num_layers: must be greater than or equal to 1, not 0"),
        ({"num_attention_heads": 1 << 20}, "num_attention_heads: must be less than or equal to 1024"),
        ({"caption_projection_dim": 40}, "caption_projection_dim: must be 32, attention_head_dim times num_attention"),
        (
            {"attention_head_dim": 3, "num_attention_heads": 1, "joint_attention_dim": None},
            "be a multiple of 4, for the",
        ),
        ({"dual_attention_layers": [3]}, r"dual_attention_layers: must be below num_layers \(3\)"),
        ({"qk_norm": "layer_norm"}, "qk_norm: must be 'rms_norm'"),
        ({"pos_embed_type": None}, "pos_embed_type: must be sincos, with a pos_embed_max_size, unless use_pos_embed"),
        ({"pos_embed_max_size": 3}, "pos_embed_max_size: must be at least 4, sample_size divided by patch_size"),
        ({"sample_size": 9}, r"sample_size: must be a multiple of patch_size \(2\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_configuration_out_of_bounds_is_refused_by_name(
    folder: Path, tmp_path: Path, changes: Mapping[str, Any], why: str
) -> None:
    copy = shutil.copytree(folder, tmp_path / "net")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(InvalidRequest, match=why):
        find_controlnet("net", copy, base=None, dtype=torch.float32)


def test_a_controlnet_for_a_unet_is_refused_by_the_server(model: Model, tmp_path: Path) -> None:
    unet = load(family_model("SD 1")).backbone.network
    folders = save({"edges": random_controlnet(unet, 0)}, tmp_path)
    with linked_server("other", folders, tmp_path) as other, Desk.closing():
        drawing = Desk(model, Offers(other)).draw(on(ORDER, other))
    assert isinstance(drawing.error, ControlNetUnusable)
    assert "it is made for a UNet, and the model is a transformer of Stable Diffusion 3" in drawing.error.message


def test_guess_mode_is_refused(model: Model) -> None:
    spec = replace(SPEC, controlnets=(control_spec("edges", IMAGE, guess_mode=True),))
    with pytest.raises(InvalidRequest, match="must be false: there is no guess mode for Stable Diffusion 3"):
        check_drawable(spec, EngineLimits(), model)


def test_pixels_in_place_of_latents_are_refused(model: Model, folder: Path) -> None:
    net = load_controlnet(
        find_controlnet("edges", folder, base=layout_of(model), dtype=torch.float32), torch.device("cpu")
    )
    control = ControlInput(name="edges", images=(IMAGE,), height=SIZE, width=SIZE, halves={})
    with pytest.raises(ControlNetUnusable, match="reads latents of its image, and got pixels"):
        ControlSession(net, control)


def opening(model: Model, latent: Tensor) -> TensorMessage:
    """Return a message that opens a session with this latent of a control image."""
    halves = {Half.CONDITIONAL: Embeds(prompt=torch.zeros(9, 96), added={POOLED: torch.zeros(64)})}
    control = ControlInput(
        name="edges", images=(latent,), height=SIZE, width=SIZE, halves=halves, latent_scaling=(0.0, 1.0)
    )
    session = SessionSpec(
        number=1,
        name="edges",
        digest="",
        height=SIZE,
        width=SIZE,
        scale=1.0,
        guess_mode=False,
        halves=tuple(halves),
        latent_scaling=control.latent_scaling,
    )
    base = layout_of(model)
    return open_message(Opening(lease=1, base=base, dtype=torch.float32, sessions=(session,), controls=(control,)))


def test_a_latent_of_another_shape_is_refused(model: Model) -> None:
    right, wrong, pixels = torch.zeros(16, 8, 8), torch.zeros(16, 8, 16), torch.zeros(16, 8, 8, dtype=torch.uint8)
    message = opening(model, right)
    assert torch.equal(read_opening(message.layout, message.buffers).controls[0].images[0], right)
    for latent, why in ((wrong, "are not latents of the shape"), (pixels, "is no latent in")):
        message = opening(model, latent)
        with pytest.raises(ValueError, match=why):
            read_opening(message.layout, message.buffers)


@pytest.mark.parametrize(
    "sessions",
    [
        {"sessions": torch.zeros(1, 2)},
        *({"sessions": torch.tensor([facts])} for facts in ([3], [0, 0], [3, 2], [1 << 20, 0])),
        *({"sessions": torch.tensor([[3, 0]]), "singles": torch.tensor(singles)} for singles in ([4], [1, 1], [1.0])),
    ],
    ids=str,
)
def test_an_answer_with_impossible_sessions_is_refused(sessions: dict[str, Tensor]) -> None:
    message = message_of({"opened": torch.tensor([1]), **sessions})
    with pytest.raises(ValueError, match="opened"):
        read_opened(message.layout, message.buffers)


def test_an_answer_has_a_part_about_single_blocks_only_where_there_are_some() -> None:
    plain, joint = OpenedSession(residuals=3), OpenedSession(residuals=5, reads_tokens=True, singles=2)
    for sessions, names in (((plain,), ["opened", "sessions"]), ((plain, joint), ["opened", "sessions", "singles"])):
        message = opened_message(7, sessions)
        assert [spec.name for spec in message.layout.specs] == names
        assert message.layout.specs[1].shape == (len(sessions), 2), "as versions read it that know no single blocks"
        assert read_opened(message.layout, message.buffers) == (7, sessions)


def test_models_of_one_width_share_a_name(model: Model) -> None:
    config = dict(model.backbone.network.config)
    base = base_layout(config, 4)
    shorter = base_layout({**config, "num_layers": 1, "joint_attention_dim": None}, 0)
    assert base.base == shorter.base == "16/2x2 tokens 32+64"
    assert base.base != base_layout({**config, "num_attention_heads": 8}, 4).base
    assert base.shapes(8, 12)[0] == (24, 32)
