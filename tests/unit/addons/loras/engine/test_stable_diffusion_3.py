"""LoRAs of Stable Diffusion 3 draw what stock Diffusers draws: of every layout, mixed in one batch, late, in half."""

from __future__ import annotations

import io
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
from bottega.addons.loras.wire import canonical
from bottega.engine.job import EngineOrder
from bottega.engine.spec import ResolvedSpec
from bottega.errors import LoraUnusable
from bottega.loras.importing.base import read_base
from bottega.loras.importing.converting import convert, sources
from bottega.model.model import Model
from bottega.model.schedulers import SamplerKind
from tests.samples.engine_loras import LorasByHand, lora_spec, random_layers
from tests.samples.family_models import SIZE, FamilyStock, family_model
from tests.samples.lora_files import canonical_layers, delta
from tests.samples.sd3_loras import LAYOUTS, READ_BY_STOCK, Sd3Lora, diffusers_file, random_lora
from tests.support.engines import TOGETHER, FixedCosts, lora_weights, make_engine
from tests.support.manual_engine import ManualEngine, load
from tests.support.slow_cases import in_every_run
from tests.support.stock import assert_close, assert_same_image

FAMILY = "SD 3.5"
SPEC = ResolvedSpec(
    prompt="a big red star on the left",
    num_inference_steps=2,
    width=SIZE,
    height=SIZE,
    seed=3,
    sampler=SamplerKind.FLOW_MATCH_EULER,
)
_T5 = "text_encoder_3"


@pytest.fixture(scope="module")
def model() -> Model:
    return load(family_model(FAMILY))


@pytest.fixture(scope="module")
def stock() -> FamilyStock:
    return FamilyStock(FAMILY)


def imported(path: Path) -> Mapping[str, Layers]:
    file = io.BytesIO()
    canonical.write(file, convert(sources(path), base=read_base(family_model(FAMILY))).modules)
    return canonical_layers(file.getvalue())


def order_of(scales: Mapping[str, float], key: str = "it", *, bound: int = 0, **changes: Any) -> EngineOrder:
    loras = tuple(lora_spec(name, scale, bound=bound) for name, scale in scales.items())
    return EngineOrder(key=key, spec=replace(SPEC, loras=loras, **changes))


@contextmanager
def with_t5(stock: FamilyStock, lora: Sd3Lora, scale: float) -> Iterator[None]:
    """Add a LoRA to the weights of stock's T5, of which stock loads none."""
    encoder = stock.text.text_encoder_3
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    with torch.no_grad():
        for (component, path), (down, up) in lora.text.items():
            if component == _T5:
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


_PICTURES = [layout for layout in LAYOUTS if layout != "ComfyUI"]


@pytest.mark.parametrize("layout", in_every_run(_PICTURES, {"Diffusers", "kohya"}))
def test_a_lora_of_every_layer_draws_what_stock_draws(
    model: Model, stock: FamilyStock, tmp_path: Path, layout: str
) -> None:
    """Where stock has no converter, it loads the same LoRA by Diffusers' names."""
    lora = random_lora(family_model(FAMILY), seed=1)
    file = LAYOUTS[layout](lora, tmp_path)
    theirs = file if layout in READ_BY_STOCK else diffusers_file(lora, tmp_path)
    with loaded(stock, {"lora": theirs}), with_t5(stock, lora, 0.8):
        stock.text.set_adapters(["lora"], [0.8])
        reference = stock.reference(SPEC)
    before = weights_of(model)
    for merged in (False, True):
        with easel_of(model, LorasByHand.of({"lora": imported(file)}), merges=merged) as easel:
            drawing = easel.draw(order_of({"lora": 0.8}))
            assert (lora_weights(easel.engine).patched is not None) is merged
        assert_close(drawing.latents[0], reference.latent)
        assert_same_image(drawing.pixels[0], reference.pixels)
        assert drawing.record.exact
    after = weights_of(model)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert [use.stock_may_leave_out for use in drawing.record.provenance.loras] == [[_T5]]


def test_a_lora_changes_the_picture_by_every_network(model: Model, tmp_path: Path) -> None:
    """Else the test above would not see a network that is left out."""
    layers = imported(diffusers_file(random_lora(family_model(FAMILY), seed=1), tmp_path))
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


def test_unlike_loras_and_plain_rows_share_a_batch_and_one_comes_late(
    model: Model, stock: FamilyStock, tmp_path: Path
) -> None:
    loras = {name: random_lora(family_model(FAMILY), seed=seed, text=False) for seed, name in enumerate("ab")}
    files = {}
    for name, lora in loras.items():
        (tmp_path / name).mkdir()
        files[name] = diffusers_file(lora, tmp_path / name)
    source = LorasByHand.of({name: imported(file) for name, file in files.items()} | {"late": imported(files["b"])})
    source.here.remove("late")
    jobs: dict[str, dict[str, float]] = {
        "plain": {},
        "one": {"a": 0.8},
        "both": {"a": 0.5, "b": -0.7},
        "weaker": {"b": 0.2},
    }
    orders = [
        order_of(scales, key, seed=seed, num_inference_steps=2 + seed)
        for seed, (key, scales) in enumerate(jobs.items())
    ]
    unguided: dict[str, Any] = {"num_inference_steps": 4, "guidance_scale": 1.0}
    with easel_of(model, source) as easel:
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


def test_in_half_precision_a_picture_with_loras_has_the_bits_of_stock(tmp_path: Path) -> None:
    lora = random_lora(family_model(FAMILY), seed=1)
    lora = replace(lora, text={part: factors for part, factors in lora.text.items() if part[0] != _T5})
    file, dtype = diffusers_file(lora, tmp_path), torch.bfloat16
    stock, source = FamilyStock(FAMILY, dtype), LorasByHand.of({"lora": imported(file)})
    easel = ManualEngine(make_engine(load(family_model(FAMILY), dtype=dtype), TOGETHER, loras=source))
    drawing = easel.draw(order_of({"lora": 0.8}))
    with loaded(stock, {"lora": file}):
        stock.text.set_adapters(["lora"], [0.8])
        assert torch.equal(drawing.latents[0], stock.latent(SPEC))
    assert drawing.record.exact


def test_a_lora_of_a_unet_fails_its_job_with_the_reason(model: Model) -> None:
    layers = random_layers(model.backbone.network, 1)
    with easel_of(model, LorasByHand.of({"other": {"unet": layers}})) as easel:
        error = easel.draw(order_of({"other": 1.0})).error
    assert isinstance(error, LoraUnusable)
    says = "a LoRA changes unet, which this Stable Diffusion 3 model does not have: it is for another model"
    assert says in error.message
