"""LoRA files in every layout, on published model folders: imported, they draw what stock Diffusers draws with them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
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
from bottega.loras.importing.base import read_base
from bottega.loras.importing.converting import convert, sources
from bottega.model.model import Model
from bottega.model_files.family_names import UNET
from tests.samples.engine_loras import LorasByHand, lora_spec
from tests.samples.lora_files import SDXL_COMPONENTS, base_shapes, canonical_layers, factors, save
from tests.samples.published import Layout, published_model
from tests.support.engines import TOGETHER, FixedCosts, lora_weights, make_engine
from tests.support.manual_engine import ManualEngine, load
from tests.support.stock import Reference, assert_close, assert_same_image, load_stock, pixels_of, said

_SIZE = 64
_SPEC = ResolvedSpec(prompt="a big red star on the left", num_inference_steps=2, width=_SIZE, height=_SIZE, seed=3)
_ATTENTION = "down_blocks.1.attentions.0.transformer_blocks.0"
# Of each kind of module that trainers train; in a text encoder all of one layer, so that no layout lacks its marks.
_UNET = (
    *(f"{_ATTENTION}.attn{place}.{name}" for place in (1, 2) for name in ("to_q", "to_k", "to_v", "to_out.0")),
    f"{_ATTENTION}.ff.net.0.proj",
    f"{_ATTENTION}.ff.net.2",
    "down_blocks.0.resnets.0.conv1",
    "down_blocks.1.resnets.0.conv_shortcut",
    "down_blocks.1.resnets.0.time_emb_proj",
)
_LAYER = "text_model.encoder.layers.0"
_TEXT = (
    *(f"{_LAYER}.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj")),
    f"{_LAYER}.mlp.fc1",
    f"{_LAYER}.mlp.fc2",
)
_RANK = 3

Parts = Mapping[tuple[str, str], tuple[Tensor, Tensor]]
"""Down and up by component and published path."""


@pytest.fixture(scope="module", params=[True])
def folder(request: pytest.FixtureRequest) -> Path:
    """param: whether the names of its text encoders' tensors have a prefix."""
    return published_model(Layout(text_prefix=request.param))


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load(folder)


@pytest.fixture(scope="module")
def stock(folder: Path) -> Any:
    return load_stock(folder)


def _parts(folder: Path) -> Parts:
    generator = torch.Generator().manual_seed(7)
    parts = {}
    for component in SDXL_COMPONENTS:
        shapes = base_shapes(component, folder)
        for path in _UNET if component == UNET else _TEXT:
            found = shapes.get(path) or shapes[path.removeprefix("text_model.")]
            parts[component, path] = factors(found, _RANK, generator=generator)
    return parts


def _config(component: str) -> dict[str, object]:
    unet = {f"^{_ATTENTION}.attn1.to_v": 9, "to_out.0": 4}
    return {
        "peft_type": "LORA",
        "r": _RANK,
        "lora_alpha": 1,
        "target_modules": list(_UNET) if component == UNET else [path.removeprefix("text_model.") for path in _TEXT],
        "alpha_pattern": unet if component == UNET else {"fc1": 5, "self_attn.k_proj": 2},
    }


def _diffusers_of_peft(parts: Parts, folder: Path) -> tuple[Path, Path]:
    """As Diffusers saves today: PEFT's names, and their configurations in the metadata."""
    tensors: dict[str, Tensor] = {}
    for (component, path), (down, up) in parts.items():
        tensors |= {f"{component}.{path}.lora_A.weight": down, f"{component}.{path}.lora_B.weight": up}
    components = dict.fromkeys(component for component, _ in parts)
    fields = {f"{component}.{key}": value for component in components for key, value in _config(component).items()}
    metadata = {"lora_adapter_metadata": json.dumps(fields)}
    return (save(tensors, folder / "pytorch_lora_weights.safetensors", metadata),) * 2


def _peft_folders(parts: Parts, folder: Path, *, prefix: str = "") -> tuple[Path, Path]:
    """Stock Diffusers reads no such folders; what it reads has the same tensors, by names of its own."""
    _, theirs = _diffusers_of_peft(parts, folder)
    for component in SDXL_COMPONENTS:
        tensors: dict[str, Tensor] = {}
        for path, (down, up) in ((path, part) for (of, path), part in parts.items() if of == component):
            name = f"base_model.model.{path.removeprefix(prefix)}"
            tensors |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
        (folder / "peft" / component).mkdir(parents=True)
        save(tensors, folder / "peft" / component / "adapter_model.safetensors")
        (folder / "peft" / component / "adapter_config.json").write_text(json.dumps(_config(component)))
    return folder / "peft", theirs


def _peft_folders_of_flat_towers(parts: Parts, folder: Path) -> tuple[Path, Path]:
    return _peft_folders(parts, folder, prefix="text_model.")


# Names of modules are told apart by the base; of each base one file is read in every run (see below for flat folders).
# What each layout is converted to, tests/unit/loras/test_converting.py compares with what Diffusers and PEFT load.
_CASES = [
    pytest.param(True, _peft_folders, id="folders of PEFT"),
    pytest.param(True, _diffusers_of_peft, id="Diffusers", marks=pytest.mark.slow),
    pytest.param(False, _peft_folders_of_flat_towers, id="folders of PEFT, flat folder", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("folder", "write"), _CASES, indirect=["folder"])
def test_a_lora_of_all_networks_draws_what_stock_diffusers_draws(
    folder: Path, model: Model, stock: Any, tmp_path: Path, write: Callable[[Parts, Path], tuple[Path, Path]]
) -> None:
    ours, theirs = write(_parts(folder), tmp_path)
    _assert_drawn_alike(folder, model, stock, ours, theirs)


def _assert_drawn_alike(
    folder: Path, model: Model, stock: Any, ours: Path, theirs: Path, *, patches: bool = False
) -> None:
    plain = _encoded(stock)
    stock.load_lora_weights(theirs, use_safetensors=True)
    try:
        encoded, reference = _encoded(stock), _drawn(stock)
    finally:
        stock.unload_lora_weights()
    loras = LorasByHand.of({"lora": _imported(ours, folder)})
    engine = make_engine(model, TOGETHER, loras=loras)
    lora_weights(engine).costs = FixedCosts(pays=patches)
    drawing = ManualEngine(engine).draw(EngineOrder(key="lora", spec=replace(_SPEC, loras=(lora_spec("lora"),))))
    lora_weights(engine).restore()
    assert_close(drawing.latents[0], reference.latent)
    assert_same_image(drawing.pixels[0], reference.pixels)
    assert float((encoded - plain).abs().max()) > 0.01, "the text encoders' part matters"


@pytest.mark.parametrize(
    ("folder", "patches"),
    [pytest.param(True, False, marks=pytest.mark.slow), (False, True)],
    indirect=["folder"],
    ids=["beside", "inside, flat folder"],
)
def test_a_lora_of_every_module_draws_what_stock_diffusers_draws(
    folder: Path, model: Model, stock: Any, tmp_path: Path, patches: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for component in SDXL_COMPONENTS:
        for path, shape in base_shapes(component, folder).items():
            down, up = factors(shape, 2, generator=generator)
            tensors |= {f"{component}.{path}.lora_A.weight": down, f"{component}.{path}.lora_B.weight": 0.3 * up}
    file = save(tensors, tmp_path / "pytorch_lora_weights.safetensors")
    _assert_drawn_alike(folder, model, stock, file, file, patches=patches)


def _encoded(stock: Any) -> Tensor:
    with torch.no_grad():
        embeds: Tensor = stock.encode_prompt(_SPEC.prompt)[0]
    return embeds


def _drawn(stock: Any) -> Reference:
    latents = list[Tensor]()

    def keep(_: Any, __: int, ___: Any, kept: dict[str, Tensor]) -> dict[str, Tensor]:
        latents.append(kept["latents"])
        return kept

    generator = torch.Generator().manual_seed(_SPEC.seed)
    image = stock(**said(_SPEC), width=_SIZE, height=_SIZE, generator=generator, callback_on_step_end=keep).images[0]
    return Reference(latent=latents[-1], pixels=pixels_of(image))


def _imported(path: Path, folder: Path) -> Mapping[str, Layers]:
    file = io.BytesIO()
    canonical.write(file, convert(sources(path), base=read_base(folder)).modules)
    return canonical_layers(file.getvalue())
