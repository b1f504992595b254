"""Rows of several sizes in one forward pass of a transformer: what each gets does not depend on the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from bottega.addons.loras.engine import UnmergedLoras
from bottega.device.heartbeat import call_after_blocks
from bottega.engine.denoiser import Denoiser
from bottega.engine.forward import Network
from bottega.model.backbone import GUIDANCE, POOLED
from bottega.model.model import Model
from bottega.model.packed import mixed_backbone
from bottega.model.rows import Embeds, Half, Row
from bottega.model.step_cache import StepCache
from tests.samples.family_models import family_model
from tests.samples.masked_networks import random_loras
from tests.support.manual_engine import load
from tests.support.stock import assert_close

# Height and width of the latent, and length of the prompt. The second and the third have as many tokens.
SIZES = ((8, 8, 20), (8, 12, 20), (12, 8, 20), (8, 8, 33), (24, 20, 7), (8, 8, 20))
# Channels of tokens, and the most residual points of a model.
WIDTH, POINTS = 32, 4
TOUCHED = (
    *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
    *("ff.net.0.proj", "ff_context.net.2", "norm1.linear", "norm1_context.linear"),
    *("context_embedder", "x_embedder", "norm_out.linear", "proj_out", "norm.linear", "proj_mlp"),
)
# The first block of SD 3.5 has two attentions. The blocks of Flux.1 are of two kinds, and its tokens have positions.
EACH_MODEL = pytest.mark.parametrize("model", ["SD 3.5", "Flux dev"], indirect=True, scope="module")


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> Model:
    return load(family_model(getattr(request, "param", "SD 3.5")))


@dataclass(kw_only=True)
class Residuals:
    """A ResidualProvider with residuals by owner. The sender of those of `dying` fails after the first point."""

    by_owner: Mapping[object, Sequence[Tensor]]
    dying: frozenset[object] = frozenset()
    dead: set[object] = field(default_factory=set)

    def ask(self, rows: list[Row]) -> None:
        assert all(row.controls for row in rows)

    def ask_ahead(self, rows: list[Row]) -> None:
        """They are here."""

    def ready(self, row: Row, points: tuple[int, ...]) -> bool:
        return True

    def wait(self, rows: list[Row], points: tuple[int, ...], timeout_s: float) -> None:
        raise AssertionError("all are here")

    def is_void(self, row: Row) -> bool:
        return row.owner in self.dead

    def take(self, row: Row, point: int) -> list[Tensor]:
        self.dead |= self.dying & {row.owner}
        return [self.by_owner[row.owner][point]]

    def is_shared(self, row: Row) -> bool:
        return False


def rows_of(model: Model, size: tuple[int, int, int], owner: int, **options: Any) -> list[Row]:
    """Return the two rows of a request."""
    height, width, tokens = size
    config = model.backbone.network.config
    chance = torch.Generator().manual_seed(owner)
    sample = torch.randn(16, height, width, generator=chance)
    added = {GUIDANCE: torch.tensor([1.0 + owner])} if config.get("guidance_embeds") else {}
    return [
        Row(
            owner=owner,
            step=0,
            half=half,
            sample=sample,
            timestep=torch.tensor(100.0 * owner + 1),
            embeds=Embeds(
                prompt=torch.randn(tokens, 96, generator=chance),
                added={POOLED: torch.randn(config.pooled_projection_dim, generator=chance), **added},
            ),
            **options,
        )
        for half in Half
    ]


def mixed_rows(model: Model) -> list[Row]:
    """Return rows of all sizes, of which some have one of three LoRAs, and some a ControlNet."""
    network = model.backbone.network
    styles = [random_loras(network, seed, TOUCHED, rank=seed) for seed in (2, 5, 4)]
    loras = (styles[0], None, styles[1], styles[0], styles[0], styles[2])
    controls = (("net",), (), ("net",), (), ("net",), ("net",))
    return [
        row
        for owner, (size, style, control) in enumerate(zip(SIZES, loras, controls, strict=True))
        for row in rows_of(model, size, owner, loras=style, controls=control)
    ]


def denoiser_of(model: Model, *, packs: bool, dying: frozenset[object] = frozenset()) -> Denoiser:
    chance = torch.Generator().manual_seed(9)
    residuals: dict[object, list[Tensor]] = {
        owner: [torch.randn(height * width // 4, WIDTH, generator=chance) for _ in range(POINTS)]
        for owner, (height, width, _) in enumerate(SIZES)
    }
    return Denoiser(
        Network(
            backbone=model.backbone,
            packed=mixed_backbone(model.backbone) if packs else None,
            row_weights=UnmergedLoras(model.backbone.network, "unet"),
            residuals=Residuals(by_owner=residuals, dying=dying),
        )
    )


@pytest.fixture(scope="module")
def alone(model: Model) -> Mapping[Row, Tensor]:
    """What each row gets in a forward pass of its own."""
    denoiser = denoiser_of(model, packs=False)
    return {row: denoiser.forward([row]).noise[row] for row in mixed_rows(model)}


@EACH_MODEL
def test_rows_of_several_sizes_get_what_they_get_alone(model: Model, alone: Mapping[Row, Tensor]) -> None:
    """With prompts of several lengths, LoRAs and ControlNets."""
    calls: list[int] = []
    layer = model.backbone.network.transformer_blocks[1].ff
    handle = layer.register_forward_hook(lambda *_: calls.append(1))
    noise = denoiser_of(model, packs=True).forward(list(alone)).noise
    handle.remove()
    assert calls == [1], "all rows share one call of a layer"
    assert noise.keys() == alone.keys()
    for row, predicted in noise.items():
        assert_close(predicted, alone[row])


@EACH_MODEL
@pytest.mark.parametrize("owners", [{0, 5}, {0, 1, 2, 3, 4}, {0, 1, 2, 3, 4, 5}], ids=["one size", "each", "all"])
def test_rows_whose_controlnet_fails_leave_the_others_right(
    model: Model, alone: Mapping[Row, Tensor], owners: set[int]
) -> None:
    """Of some sizes no row is left."""
    rows = [row for row in alone if row.owner in owners]
    noise = denoiser_of(model, packs=True, dying=frozenset({0, 4})).forward(rows).noise
    assert {row.owner for row in noise} == owners - {0, 4}
    for row, predicted in noise.items():
        assert_close(predicted, alone[row])


@EACH_MODEL
def test_rows_that_reuse_a_step_leave_the_others_right(model: Model, alone: Mapping[Row, Tensor]) -> None:
    """They reuse the step itself, which changes nothing."""
    caches = {row: StepCache() for row in alone if row.owner in {1, 3} and row.half is Half.CONDITIONAL}
    rows = {replace(row, step_cache=caches.get(row)): predicted for row, predicted in alone.items()}
    denoiser = denoiser_of(model, packs=True)
    assert not denoiser.forward(list(rows)).reused
    prediction = denoiser.forward(list(rows))
    assert prediction.reused == {row for row in rows if row.step_cache is not None}
    assert prediction.noise.keys() == rows.keys()
    for row, predicted in prediction.noise.items():
        assert_close(predicted, rows[row])


@EACH_MODEL
def test_blocks_give_signs_of_life(model: Model, alone: Mapping[Row, Tensor]) -> None:
    beats, names = set[str](), [block.name for block in model.backbone.blocks]
    for name in names:
        call_after_blocks([model.backbone.network.get_submodule(name)], partial(beats.add, name))
    for rows in (list(alone)[:1], list(alone)):
        beats.clear()
        denoiser_of(model, packs=True).forward(rows)
        assert beats == set(names)


def test_rows_of_one_size_run_as_ever(model: Model, alone: Mapping[Row, Tensor]) -> None:
    network = Network(backbone=model.backbone, packed=mixed_backbone(model.backbone))
    assert network.backbone_for([row for row in alone if row.owner in {0, 5}]) is model.backbone
