"""A ControlNet by itself: what folders can be served, what a session computes once, and what a shared forward gives."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ControlNetModel, StableDiffusionXLPipeline
from torch import Tensor

from bottega.addons.controlnets.engine import (
    ControlLayout,
    ControlRow,
    ControlSession,
    LoadedControlNet,
    find_controlnet,
    load_controlnet,
    process_image,
    read_base_layout,
    run_group,
)
from bottega.addons.controlnets.engine.network import UNetControlNet
from bottega.addons.controlnets.engine.provider import ControlInput
from bottega.errors import ControlNetUnusable
from bottega.miniature import WEIGHTS
from bottega.model.model import Model
from bottega.model.rows import Embeds, Half
from tests.samples.controlnets import control_image, layout_of, random_controlnet, save, sources
from tests.support.manual_engine import load
from tests.support.stock import load_stock

CPU = torch.device("cpu")
SIDE = 64


@pytest.fixture(scope="module")
def stock() -> StableDiffusionXLPipeline:
    return load_stock()


@pytest.fixture(scope="module")
def model() -> Model:
    """The embedded one, whose sizes are named here."""
    return load()


@pytest.fixture(scope="module")
def network(stock: StableDiffusionXLPipeline) -> ControlNetModel:
    """As Diffusers has it."""
    return random_controlnet(stock.unet, 1)


@pytest.fixture(scope="module")
def folder(network: ControlNetModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save({"edges": network}, tmp_path_factory.mktemp("controlnets"))["edges"]


@pytest.fixture(scope="module")
def base(model: Model) -> ControlLayout:
    return layout_of(model)


@pytest.fixture(scope="module")
def net(model: Model, folder: Path) -> LoadedControlNet:
    return load_controlnet(sources(model, {"edges": folder})["edges"], CPU)


def embeds(layout: ControlLayout, seed: int) -> Embeds:
    generator = torch.Generator().manual_seed(seed)
    return Embeds(
        prompt=torch.randn(77, layout.context_width, generator=generator),
        added={
            "text_embeds": torch.randn(layout.pooled_width, generator=generator),
            "time_ids": torch.tensor([SIDE, SIDE, 0, 0, SIDE, SIDE], dtype=torch.float32),
        },
    )


def control(layout: ControlLayout, seed: int, **options: Any) -> ControlInput:
    said: dict[str, Any] = {
        "name": "edges",
        "images": (control_image(seed),),
        "height": SIDE,
        "width": SIDE,
        "halves": {Half.UNCONDITIONAL: embeds(layout, 2 * seed), Half.CONDITIONAL: embeds(layout, 2 * seed + 1)},
    }
    return ControlInput(**(said | options))


def rows_of(session: ControlSession, seed: int) -> list[ControlRow]:
    generator = torch.Generator().manual_seed(seed)
    sample = torch.randn(4, SIDE // 4, SIDE // 4, generator=generator)
    timestep = torch.tensor(100.0 * seed)
    return [ControlRow(session=session, half=half, sample=sample, timestep=timestep) for half in session.halves]


@torch.inference_mode()
def stock_residuals(
    network: ControlNetModel, controls: list[ControlInput], rows: list[ControlRow], **options: Any
) -> Any:
    """Diffusers' own forward of rows of these controls, in one batch; by point."""
    conditions = [row.session.halves[row.half] for row in rows]
    images = [process_image(each.images[0], SIDE, SIDE, 4) for each in controls for _ in each.halves]
    skips, middle = network(
        torch.stack([row.sample for row in rows]),
        torch.stack([row.timestep for row in rows]),
        encoder_hidden_states=torch.stack([each.prompt for each in conditions]),
        controlnet_cond=torch.stack(images),
        added_cond_kwargs=dict(Embeds.stack(conditions).added),
        return_dict=False,
        **options,
    )
    return [*skips, middle]


def scaled(rows: list[ControlRow], residuals: list[Tensor]) -> list[list[Tensor]]:
    """The residuals of a group by row and point, each at its session's scale."""
    return [
        [residual[index] * scale for residual, scale in zip(residuals, row.session.scales, strict=True)]
        for index, row in enumerate(rows)
    ]


def assert_equal(ours: list[list[Tensor]], theirs: list[Tensor]) -> None:
    """By row and point against by point."""
    for index, row in enumerate(ours):
        for one, residual in zip(row, theirs, strict=True):
            assert torch.equal(one, residual[index])


def test_residuals_of_a_group_are_those_of_the_unmodified_forward(
    net: LoadedControlNet, network: ControlNetModel
) -> None:
    controls = [control(net.layout, seed) for seed in (1, 2, 3)]
    rows = [row for seed, each in enumerate(controls, 1) for row in rows_of(ControlSession(net, each), seed)]
    assert_equal(scaled(rows, run_group(rows)), stock_residuals(network, controls, rows))


def test_a_row_that_is_alone_has_the_residuals_of_a_forward_of_one_row(
    net: LoadedControlNet, network: ControlNetModel
) -> None:
    one = control(net.layout, 1)
    one = replace(one, halves={Half.CONDITIONAL: one.halves[Half.CONDITIONAL]})
    session = ControlSession(net, one)
    rows = rows_of(session, 1)
    for _ in range(2):  # what it keeps for company does not spoil it
        assert_equal(scaled(rows, run_group(rows)), stock_residuals(network, [one], rows))
        session.embedded(2)


def test_the_control_image_is_embedded_once(net: LoadedControlNet, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    embed = net.embed

    def counted(image: Tensor, *, rows: int) -> Tensor:
        calls.append(rows)
        return embed(image, rows=rows)

    monkeypatch.setattr(net, "embed", counted)
    session = ControlSession(net, control(net.layout, 1))
    for seed in range(3):
        run_group(rows_of(session, seed))
    assert calls == [2]


def test_each_row_has_its_own_scale(net: LoadedControlNet, network: ControlNetModel) -> None:
    controls = [control(net.layout, 1, scale=0.3), control(net.layout, 2, scale=1.7), control(net.layout, 3)]
    rows = [row for seed, each in enumerate(controls, 1) for row in rows_of(ControlSession(net, each), seed)]
    theirs = stock_residuals(network, controls, rows)
    for row, scale in enumerate([0.3, 0.3, 1.7, 1.7, 1.0, 1.0]):
        for ours, residual in zip(scaled(rows, run_group(rows))[row], theirs, strict=True):
            assert torch.equal(ours, residual[row] * scale)


def test_in_guess_mode_deeper_residuals_are_stronger_as_in_diffusers(
    net: LoadedControlNet, network: ControlNetModel
) -> None:
    guessing = control(net.layout, 1, scale=0.9, guess_mode=True)
    rows = rows_of(ControlSession(net, guessing), 1)
    theirs = stock_residuals(network, [guessing], rows, guess_mode=True, conditioning_scale=0.9)
    assert_equal(scaled(rows, run_group(rows)), theirs)


def test_the_base_models_layout_is_read_without_loading_it(base: ControlLayout) -> None:
    assert read_base_layout(WEIGHTS) == base


def test_with_fixed_rows_company_changes_no_bit(net: LoadedControlNet) -> None:
    sessions = [ControlSession(net, control(net.layout, seed)) for seed in (1, 2, 3)]
    rows = [rows_of(session, seed) for seed, session in enumerate(sessions, 1)]
    alone = run_group(rows[1], fixed_rows=8)
    together = run_group([*rows[0], *rows[1], *rows[2]], fixed_rows=8)
    assert all(torch.equal(one[:2], many[2:4]) for one, many in zip(alone, together, strict=True))


def test_its_size_is_known_before_it_is_loaded(
    model: Model, base: ControlLayout, folder: Path, net: LoadedControlNet
) -> None:
    assert isinstance(net, UNetControlNet)
    parameters = sum(parameter.numel() for parameter in net.network.parameters()) + sum(
        parameter.numel() for parameter in net.embedding.parameters()
    )
    for dtype in (torch.float32, torch.bfloat16):
        found = find_controlnet("edges", folder, base=base, dtype=dtype)
        assert found.size_bytes == parameters * dtype.itemsize


def test_loading_changes_nothing_for_other_threads(
    folder: Path, base: ControlLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise AssertionError("another thread's tensors would be of this type")

    monkeypatch.setattr(torch, "set_default_dtype", refuse)
    net = load_controlnet(find_controlnet("edges", folder, base=base, dtype=torch.bfloat16), CPU)
    rows = rows_of(ControlSession(net, control(net.layout, 1)), 1)
    residuals = run_group(rows)
    assert {residual.dtype for residual in residuals} == {torch.bfloat16}
    assert all(bool(residual.isfinite().all()) for residual in residuals)


def with_config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def with_file(name: str, content: bytes) -> Callable[[Path], None]:
    """Puts a file in a file's place."""

    def change(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return change


def with_pickle(folder: Path) -> None:
    (folder / "diffusion_pytorch_model.safetensors").rename(folder / "diffusion_pytorch_model.bin")


WEIGHTS_FILE = "diffusion_pytorch_model.safetensors"
MISFITS = {
    "context width": (
        with_config(cross_attention_dim=2048),
        r"its context_width is 2048, the model's 128 \(cross_attention_dim",
    ),
    "block widths": (
        with_config(block_out_channels=[320, 640]),
        r"its residual points are 320/1 320/1 .* 640/2, the model's 48/1 ",
    ),
    "no configuration": (without("config.json"), r"config\.json: there is no such file"),
    "no weights": (without(WEIGHTS_FILE), "has no diffusion_pytorch_model.safetensors"),
    "a pickle": (with_pickle, "only pickled weights"),
    "weights that are none": (with_file(WEIGHTS_FILE, b"hello, this is no tensor"), WEIGHTS_FILE),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_folder_that_cannot_be_served_is_refused_by_name(
    folder: Path, base: ControlLayout, tmp_path: Path, case: str
) -> None:
    change, said = MISFITS[case]
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    change(broken)
    with pytest.raises(ControlNetUnusable, match=rf"ControlNet wrong .*{said}"):
        find_controlnet("wrong", broken, base=base, dtype=torch.float32)


def test_inputs_of_other_types_are_taken_as_the_network_needs_them(net: LoadedControlNet) -> None:
    session = ControlSession(net, control(net.layout, 1))
    (_, row) = rows_of(session, 1)
    half = replace(row, sample=row.sample.half().double(), timestep=torch.tensor(100))
    residuals = run_group([half])
    assert residuals[0].dtype == torch.float32
    height, width = row.sample.shape[-2:]
    assert [tuple(residual.shape[1:]) for residual in residuals] == net.layout.shapes(height, width)


def test_a_base_model_and_what_fits_it_are_told_by_one_short_text() -> None:
    base = read_base_layout(WEIGHTS)
    for folder in (WEIGHTS / "controlnets").iterdir():
        assert find_controlnet("own", folder, base=None, dtype=torch.float32).layout.base == base.base
    others = [replace(base, context_width=2048), replace(base, points=base.points[:-1]), replace(base, latent_scale=8)]
    deep = [replace(base, points=tuple((64 + level, level) for level in range(count))) for count in (40, 41)]
    said = [layout.base for layout in (base, *others, *deep)]
    assert len(set(said)) == len(said)
    assert all(0 < len(text) <= 128 for text in said)
