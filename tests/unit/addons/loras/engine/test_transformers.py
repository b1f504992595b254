"""LoRAs of transformers draw what stock Diffusers draws: of every layout, mixed in one batch, late, in half."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bottega.addons.loras.engine import Layers
from bottega.engine.job import EngineOrder
from bottega.engine.spec import ResolvedSpec
from bottega.errors import LoraUnusable
from bottega.model.model import Model
from bottega.model.schedulers import SamplerKind
from tests.samples.edits import box_mask, edit_order, template
from tests.samples.engine_loras import LorasByHand, lora_spec, random_layers
from tests.samples.family_models import SIZE, Z_IMAGE, FamilyStock, family_model
from tests.samples.lora_files import delta, imported_layers, save
from tests.samples.transformer_loras import (
    LAYOUTS,
    ONLY_FLUX,
    READ_BY_STOCK,
    TransformerLora,
    diffusers_file,
    random_lora,
)
from tests.support.engines import TOGETHER, FixedCosts, lora_weights, make_engine
from tests.support.manual_engine import ManualEngine, load
from tests.support.slow_cases import in_every_run
from tests.support.stock import assert_close, assert_same_image

SPEC = ResolvedSpec(
    prompt="a big red star on the left",
    num_inference_steps=2,
    width=SIZE,
    height=SIZE,
    seed=3,
    sampler=SamplerKind.FLOW_MATCH_EULER,
)
_T5 = {"SD 3.5": "text_encoder_3", "Flux dev": "text_encoder_2"}
families = pytest.mark.parametrize("family", in_every_run([*_T5, Z_IMAGE], _T5))


@functools.cache
def model_of(family: str) -> Model:
    return load(family_model(family))


@functools.cache
def stock_of(family: str) -> FamilyStock:
    return FamilyStock(family)


def imported(family: str, path: Path) -> Mapping[str, Layers]:
    return imported_layers(family_model(family), path)


def order_of(scales: Mapping[str, float], key: str = "it", *, bound: int = 0, **changes: Any) -> EngineOrder:
    loras = tuple(lora_spec(name, scale, bound=bound) for name, scale in scales.items())
    return EngineOrder(key=key, spec=replace(SPEC, loras=loras, **changes))


@contextmanager
def with_t5(stock: FamilyStock, lora: TransformerLora, scale: float) -> Iterator[None]:
    """Add a LoRA to the weights of stock's T5, of which stock loads none."""
    if not lora.text:
        yield
        return
    encoder = getattr(stock.text, _T5[stock.family])
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    with torch.no_grad():
        for (component, path), (down, up) in lora.text.items():
            if component == _T5[stock.family]:
                encoder.get_submodule(path).weight += scale * delta(down, up, lora.scale).float()
    yield
    encoder.load_state_dict(before)


@contextmanager
def loaded(stock: FamilyStock, files: Mapping[str, Path]) -> Iterator[None]:
    """Have LoRAs in stock, by the names of their adapters."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # PEFT: several are meant
        for name, path in files.items():
            stock.text.load_lora_weights(path, adapter_name=name, use_safetensors=True)
    yield
    stock.text.unload_lora_weights()


@contextmanager
def easel_of(model: Model, source: LorasByHand, *, merges: bool = True) -> Iterator[ManualEngine]:
    """An engine whose LoRAs leave nothing in the weights, which others share."""
    engine = make_engine(model, TOGETHER, loras=source)
    lora_weights(engine).costs = FixedCosts(pays=merges)
    yield ManualEngine(engine)
    lora_weights(engine).restore()


def weights_of(model: Model) -> dict[str, Tensor]:
    return {
        f"{part}.{name}": tensor.clone()
        for part, network in model.networks.items()
        for name, tensor in network.state_dict().items()
    }


_PICTURES = [
    (family, layout)
    for family in (*_T5, Z_IMAGE)
    for layout in LAYOUTS
    if family.startswith("Flux") or layout not in ONLY_FLUX
]
_QUICK = {("SD 3.5", "Diffusers"), ("SD 3.5", "kohya"), ("Flux dev", "kohya"), (Z_IMAGE, "kohya")}


@pytest.mark.parametrize(("family", "layout"), in_every_run(_PICTURES, _QUICK))
def test_a_lora_of_every_layer_draws_what_stock_draws(tmp_path: Path, family: str, layout: str) -> None:
    """Where stock's converter knows other widths only, or there is none, it loads the same LoRA by Diffusers' names."""
    model, stock = model_of(family), stock_of(family)
    lora = random_lora(family_model(family), seed=1, text=layout not in ONLY_FLUX)
    file = LAYOUTS[layout](lora, tmp_path)
    reads = layout in READ_BY_STOCK and (family, layout) != (Z_IMAGE, "oldest names of Diffusers")
    theirs = file if reads else diffusers_file(lora, tmp_path)
    with loaded(stock, {"lora": theirs}), with_t5(stock, lora, 0.8):
        stock.text.set_adapters(["lora"], [0.8])
        reference = stock.reference(SPEC)
    before = weights_of(model)
    for merged in (False, True):
        with easel_of(model, LorasByHand.of({"lora": imported(family, file)}), merges=merged) as easel:
            drawing = easel.draw(order_of({"lora": 0.8}))
            assert (lora_weights(easel.engine).patched is not None) is merged
        assert_close(drawing.latents[0], reference.latent)
        assert_same_image(drawing.pixels[0], reference.pixels)
        assert drawing.record.exact
    after = weights_of(model)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    (use,) = drawing.record.provenance.loras
    assert (_T5.get(family) in use.stock_may_leave_out) is bool(lora.text)
    assert ("transformer.x_embedder" in use.stock_may_leave_out) is family.startswith("Flux")


@pytest.mark.parametrize("family", _T5)
def test_a_lora_changes_the_picture_by_every_network(tmp_path: Path, family: str) -> None:
    """Else the test above would not see a network that is left out."""
    model = model_of(family)
    layers = imported(family, diffusers_file(random_lora(family_model(family), seed=1), tmp_path))
    without = [{name: some for name, some in layers.items() if name != left_out} for left_out in (*layers, "")]
    loras = {str(number): some for number, some in enumerate(without)}
    with easel_of(model, LorasByHand.of(loras)) as easel:
        drawings = easel.run({0: [order_of({name: 0.8}, name, num_inference_steps=1) for name in loras]})
    *lacking, whole = (drawings[name].latents[0] for name in loras)
    differences = {
        name: float((latent - whole).abs().max()) for name, latent in zip(layers, lacking, strict=True) if layers[name]
    }
    assert differences.keys() == model.networks.keys()
    assert all(difference > 1e-3 for difference in differences.values()), differences


@families
def test_unlike_loras_and_plain_rows_share_a_batch_and_one_comes_late(tmp_path: Path, family: str) -> None:
    stock = stock_of(family)
    loras = {name: random_lora(family_model(family), seed=seed, text=False) for seed, name in enumerate("ab")}
    files = {}
    for name, lora in loras.items():
        (tmp_path / name).mkdir()
        files[name] = diffusers_file(lora, tmp_path / name)
    layers = {name: imported(family, file) for name, file in files.items()}
    source = LorasByHand.of(layers | {"late": layers["b"]})
    source.here.remove("late")
    jobs: dict[str, dict[str, float]] = {
        "plain": {},
        "one": {"a": 0.8},
        "both": {"a": 0.5, "b": -0.7},
        "weaker": {"b": 0.2},
    }
    orders = [
        order_of(scales, key, seed=seed, num_inference_steps=2 + seed % 2)
        for seed, (key, scales) in enumerate(jobs.items())
    ]
    unguided: dict[str, Any] = {"num_inference_steps": 4, "guidance_scale": 1.0}
    with easel_of(model_of(family), source) as easel:
        late = easel.submit(order_of({"late": 0.9}, "late", bound=3, **unguided))
        for order in orders:
            easel.submit(order)
        while late.job is None or late.job.steps_done < 2:
            easel.turn()
        source.come("late")
        drawings = easel.run()
    assert [use.from_step for use in late.record.provenance.loras] == [2]
    assert drawings["both"].record.provenance.mean_group_requests > 2

    def switch(step: int, latent: Tensor) -> Tensor:
        if step == 1:
            stock.text.enable_lora()
            stock.text.set_adapters(["b"], [0.9])
        return latent

    with loaded(stock, files):
        for order in orders[1:]:
            scales = jobs[str(order.key)]
            stock.text.set_adapters(list(scales), list(scales.values()))
            assert_close(drawings[order.key].latents[0], stock.latent(order.spec))
        stock.text.disable_lora()
        assert_close(drawings["plain"].latents[0], stock.latent(orders[0].spec))
        spec = order_of({}, **unguided).spec
        assert_close(late.latents[0], stock.latent(spec, after_step=switch))


@families
def test_in_half_precision_a_picture_with_loras_has_the_bits_of_stock(tmp_path: Path, family: str) -> None:
    lora = random_lora(family_model(family), seed=1)
    lora = replace(lora, text={part: factors for part, factors in lora.text.items() if part[0] != _T5.get(family)})
    file, dtype = diffusers_file(lora, tmp_path), torch.bfloat16
    stock, source = FamilyStock(family, dtype), LorasByHand.of({"lora": imported(family, file)})
    easel = ManualEngine(make_engine(load(family_model(family), dtype=dtype), TOGETHER, loras=source))
    drawing = easel.draw(order_of({"lora": 0.8}))
    with loaded(stock, {"lora": file}):
        stock.text.set_adapters(["lora"], [0.8])
        assert torch.equal(drawing.latents[0], stock.latent(SPEC))
    assert drawing.record.exact


def test_fill_draws_with_a_lora_of_dev_what_stock_draws(tmp_path: Path) -> None:
    """Stock, too, adds zeros for the mask and the image that dev's transformer does not read."""
    family, generator = "Flux Fill", torch.Generator().manual_seed(1)
    down, up = torch.randn(2, 64, generator=generator), torch.randn(32, 2, generator=generator)
    name = "transformer.x_embedder"
    file = save({f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}, tmp_path / "a.safetensors")
    order = order_of({"lora": 0.8}, strength=1.0)
    image, mask = template(SIZE, SIZE), box_mask((6, 9, 21, 28), SIZE, SIZE)
    stock = stock_of(family)
    with loaded(stock, {"lora": file}):
        stock.text.set_adapters(["lora"], [0.8])
        theirs = stock.latent(order.spec, image=image, mask=mask)
    assert not torch.allclose(theirs, stock.latent(order.spec, image=image, mask=mask), atol=1e-3)
    with easel_of(model_of(family), LorasByHand.of({"lora": imported(family, file)})) as easel:
        assert_close(easel.draw(edit_order(order.spec, image, mask)).latents[0], theirs)


def test_a_lora_of_a_unet_fails_its_job_with_the_reason() -> None:
    model = model_of("SD 3.5")
    layers = random_layers(model.backbone.network, 1)
    with easel_of(model, LorasByHand.of({"other": {"unet": layers}})) as easel:
        error = easel.draw(order_of({"other": 1.0})).error
    assert isinstance(error, LoraUnusable)
    says = "a LoRA changes unet, which this Stable Diffusion 3 model does not have: it is for another model"
    assert says in error.message
