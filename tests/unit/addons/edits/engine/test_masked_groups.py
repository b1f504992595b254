"""Rows with different masks, plain rows, LoRAs and ControlNets in one forward: no result depends on the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from diffusers import ModelMixin
from torch import Tensor

from bottega.addons.edits.engine.activations import edit_activations
from bottega.addons.edits.engine.masked.backbone import make_masked_backbone, transformer_blocks
from bottega.addons.edits.engine.masked.feature_maps import FullMaps
from bottega.addons.edits.engine.sparse import SparseMaps
from bottega.addons.loras.engine import UnmergedLoras
from bottega.engine.denoiser import Denoiser
from bottega.engine.forward import FIRST_RESIDUAL_S
from bottega.model.rows import Row
from bottega.model_files.family_names import UNET
from tests.samples.masked_networks import (
    StepInMemory,
    box,
    denoiser_of,
    masked,
    plain_row,
    point_shapes,
    random_loras,
    recording,
    small_flux,
    small_joint,
    small_unet,
)

SIZE = (32, 32)
# Of the 16x16 tokens of the finest attention level: .05, .11, .19, .35 and .6 of them.
MASKS = {0.05: box(4, 6, 6, 8, size=SIZE), 0.11: box(20, 2, 8, 14, size=SIZE), 0.19: box(8, 8, 14, 14, size=SIZE)} | {
    0.35: box(0, 12, 18, 20, size=SIZE),
    0.6: box(4, 0, 28, 22, size=SIZE),
}
# Everything that a LoRA may touch: layers that take packed tokens, whole ones, feature maps, and what is there once.
TOUCHED = (
    *("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out", "conv1", "conv_in"),
    *("norm1.linear", "add_q_proj", "add_k_proj", "to_add_out", "ff_context.net.2", "norm.linear", "proj_mlp"),
)
NEIGHBOUR = 1e-4
# A layer in the middle of each network.
MIDDLE = dict.fromkeys(("full convolutions", "sparse convolutions"), "mid_block.attentions.0.transformer_blocks.0.ff")
MIDDLE |= {"joint blocks": "transformer_blocks.1.ff", "Flux's blocks": "transformer_blocks.0.ff"}
MAPS = {"full convolutions": FullMaps, "sparse convolutions": SparseMaps}
MAPS |= {"joint blocks": FullMaps, "Flux's blocks": FullMaps}


@dataclass(kw_only=True)
class Residuals:
    """A ResidualProvider with residuals by handle and point. late: handles whose residuals never come."""

    addends: Mapping[object, Sequence[Tensor]]
    late: set[object] = field(default_factory=set)

    def ask(self, rows: list[Row]) -> None:
        """They are here."""

    def ask_ahead(self, rows: list[Row]) -> None:
        """They are here."""

    def ready(self, row: Row, points: tuple[int, ...]) -> bool:
        return not self.late & set(row.controls)

    def wait(self, rows: list[Row], points: tuple[int, ...], timeout_s: float) -> None:
        assert timeout_s <= FIRST_RESIDUAL_S, "nobody waits for long while others can go on"
        time.sleep(timeout_s)

    def is_void(self, row: Row) -> bool:
        return False

    def take(self, row: Row, point: int) -> list[Tensor]:
        return [self.addends[handle][point] for handle in row.controls]

    def is_shared(self, row: Row) -> bool:
        return False


@pytest.fixture(scope="module", params=MAPS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def network(kind: str) -> ModelMixin:
    transformers = {"joint blocks": small_joint, "Flux's blocks": small_flux}
    return transformers[kind]() if kind in transformers else small_unet(use_linear_projection=False)


@pytest.fixture(scope="module")
def residuals(network: ModelMixin) -> dict[object, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shapes = point_shapes(network, SIZE)
    return {name: [torch.randn(shape, generator=generator) * 0.5 for shape in shapes] for name in ("edges", "depth")}


def mixed_rows(network: ModelMixin, predict: Denoiser) -> list[Row]:
    """Five edits of five templates, one with LoRAs and one with a ControlNet, plain rows, and one that records."""
    loras = {key: random_loras(network, key, TOUCHED, rank=key) for key in (2, 5)}
    rows = [
        plain_row(0, size=SIZE),
        plain_row(1, size=SIZE, loras=loras[2]),
        plain_row(2, size=SIZE, controls=("edges",)),
        recording(plain_row(3, size=SIZE, loras=loras[5]), StepInMemory()),
    ]
    options: list[dict[str, Any]] = [
        {},
        {"loras": loras[2]},
        {"controls": ("depth", "edges")},
        {"loras": loras[5], "controls": ("edges",)},
        {"controls": ("depth",)},
    ]
    for seed, computed in enumerate(MASKS.values(), start=10):
        template, recorded = plain_row(seed, size=SIZE, **options[seed % len(options)]), StepInMemory()
        predict.predict([recording(template, recorded)])
        edited = torch.where(computed, plain_row(seed + 50, size=SIZE).sample, template.sample)
        rows.append(masked(replace(template, sample=edited, owner=seed), recorded, computed, StepInMemory()))
        # The other half of its guidance: as many tokens, so that both are one call of attention.
        rows.append(masked(replace(template, sample=edited, owner=seed), recorded, computed))
    return rows


Make = Callable[..., Denoiser]


@pytest.fixture
def make(kind: str, network: ModelMixin, residuals: Mapping[object, Sequence[Tensor]]) -> Make:
    def made(late: str = "") -> Denoiser:
        provider = Residuals(addends=residuals, late={late} if late else set())
        masked = make_masked_backbone(network, maps=MAPS[kind]())
        return denoiser_of(network, masked, row_weights=UnmergedLoras(network, UNET), residuals=provider)

    return made


def test_five_masks_plain_rows_loras_and_controlnets_share_a_forward_and_none_depends_on_the_others(
    kind: str, network: ModelMixin, residuals: dict[object, list[Tensor]], make: Make
) -> None:
    denoiser = make()
    rows = mixed_rows(network, denoiser)
    calls: list[int] = []
    middle = network.get_submodule(MIDDLE[kind])
    handle = middle.register_forward_hook(lambda *_: calls.append(1))
    together = denoiser.predict(rows)
    handle.remove()
    assert calls == [1], "all rows share one call of a layer"
    for row in rows:
        alone = denoiser.predict([row])
        assert (together.noise[row] - alone.noise[row]).abs().max() < NEIGHBOUR
    for row in rows[4:]:
        edit = edit_activations(row.activations)
        assert edit is not None
        assert edit.recorded is not None
        assert set(transformer_blocks(network)) <= set(edit.recorded.reused)
    provider = Residuals(addends=residuals)
    plain = denoiser_of(network, row_weights=UnmergedLoras(network, UNET), residuals=provider).predict(rows[:4])
    for row in rows[:4]:
        assert (together.noise[row] - plain.noise[row]).abs().max() < NEIGHBOUR


def test_rows_whose_residuals_are_late_leave_with_their_tokens(network: ModelMixin, make: Make) -> None:
    rows = mixed_rows(network, make())
    noise = make(late="edges").predict(rows).noise
    assert {row.owner for row in rows} - {row.owner for row in noise} == {
        row.owner for row in rows if "edges" in row.controls
    }
    everybody = make().predict(rows).noise
    assert 0 < len(noise) < len(rows)
    for row, predicted in noise.items():
        assert (predicted - everybody[row]).abs().max() < NEIGHBOUR
