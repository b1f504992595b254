"""LoRAs of Stable Diffusion 3: every layout is converted to the same changes, and what cannot be is refused."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bottega.addons.loras.engine import LoraLayer, WholeLayer
from bottega.addons.loras.engine.lora import weight_difference
from bottega.addons.loras.wire import canonical
from bottega.errors import BadLora
from bottega.loras.importing.base import Base, read_base
from bottega.loras.importing.converting import convert, sources
from bottega.loras.importing.naming import base_family
from bottega.loras.importing.process import _answer
from bottega.miniature import WEIGHTS
from bottega.model_files.family_names import SD3, TITLES
from bottega.v1.lora_import_pb2 import LoraImportCall, LoraImportSource
from tests.samples.family_models import family_model
from tests.samples.lora_files import base_shapes, canonical_layers, delta, low_rank, save
from tests.samples.sd3_loras import LAYOUTS, TRANSFORMER, random_lora

# Of the models for tests.
_WIDTH = 32
_QKV, _FINAL = "joint_blocks.0.x_block.attn.qkv", "final_layer.adaLN_modulation.1"


@pytest.fixture(scope="module")
def base() -> Base:
    return read_base(family_model("SD 3.5"))


def _layers(base: Base, path: Path, *, allow_partial: bool = False) -> dict[str, dict[str, LoraLayer | WholeLayer]]:
    file = io.BytesIO()
    converted = convert(sources(path), base=base, family=TITLES[SD3], allow_partial=allow_partial)
    canonical.write(file, converted.modules)
    return canonical_layers(file.getvalue())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_adds_what_its_definition_says(base: Base, tmp_path: Path, layout: str) -> None:
    """What Stability's names mean, Diffusers' own conversion of checkpoints says, which takes them apart and swaps."""
    lora = random_lora(family_model("SD 3.5"), seed=1, text=layout != "ComfyUI")
    made = {
        f"{component}.{path}": delta(layer.down, layer.up, layer.scale)
        for component, layers in _layers(base, LAYOUTS[layout](lora, tmp_path)).items()
        for path, layer in low_rank(layers).items()
    }
    expected = {f"{of}.{path}": delta(down, up, lora.scale) for (of, path), (down, up) in lora.parts.items()}
    assert made.keys() == expected.keys()
    paths = base_shapes(TRANSFORMER, family_model("SD 3.5"))
    assert {path for of, path in lora.parts if of == TRANSFORMER} == paths.keys(), "of every layer"
    for name, value in made.items():
        assert torch.allclose(value, expected[name], atol=1e-6), name
    # The text's last normalisation has scale and shift in another order than in Stability's code.
    swapped = expected[f"{TRANSFORMER}.transformer_blocks.2.norm1_context.linear"]
    down, up = lora.stability["joint_blocks.2.context_block.adaLN_modulation.1"]
    assert torch.allclose(swapped[:_WIDTH], delta(down, up, lora.scale)[_WIDTH:])


def _draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.3


def _kinds(outputs: int) -> dict[str, tuple[dict[str, Tensor], Tensor]]:
    """Return tensors of LyCORIS for a module of so many outputs, and the change that they define."""
    up, down, up2, down2 = (_draw(*shape, seed=seed) for seed, shape in enumerate([(outputs, 2), (2, _WIDTH)] * 2))
    rows = 6 if outputs % 6 == 0 else 4
    first, second = _draw(rows, 4, seed=4), _draw(outputs // rows, _WIDTH // 4, seed=5)
    half_up, half_down = _draw(outputs // rows, 2, seed=6), _draw(2, _WIDTH // 4, seed=7)
    alpha = torch.tensor(3.0)
    hada = {"hada_w1_a": up, "hada_w1_b": down, "hada_w2_a": up2, "hada_w2_b": down2, "alpha": alpha}
    lokr = {"lokr_w1": first, "lokr_w2_a": half_up, "lokr_w2_b": half_down, "alpha": alpha}
    return {
        "LoRA": ({"lora_down.weight": down, "lora_up.weight": up, "alpha": alpha}, 1.5 * up @ down),
        "LoHa": (hada, 1.5 * (up @ down) * (up2 @ down2)),
        "LoKr": ({"lokr_w1": first, "lokr_w2": second}, torch.kron(first, second)),
        "LoKr of low rank": (lokr, 1.5 * torch.kron(first, half_up @ half_down)),
        "difference": ({"diff": _draw(outputs, _WIDTH, seed=8)}, _draw(outputs, _WIDTH, seed=8)),
    }


@pytest.mark.parametrize("module", [_QKV, _FINAL])
@pytest.mark.parametrize("kind", list(_kinds(96)))
@pytest.mark.parametrize("dora", [False, True])
def test_every_kind_of_change_is_divided_among_modules(
    base: Base, tmp_path: Path, module: str, kind: str, dora: bool
) -> None:
    outputs = {_QKV: 3 * _WIDTH, _FINAL: 2 * _WIDTH}[module]
    parts, change = _kinds(outputs)[kind]
    weight, bias = _draw(outputs, _WIDTH, seed=9), _draw(outputs, seed=10)
    tensors = {**parts, "diff_b": bias}
    if dora:
        norms = tensors["dora_scale"] = 1 + _draw(outputs, 1, seed=11)
        changed = weight + change
        change = changed * norms / torch.linalg.vector_norm(changed, dim=1, keepdim=True) - weight
    name = f"lora_unet_{module.replace('.', '_')}"
    path = save({f"{name}.{part}": tensor for part, tensor in tensors.items()}, tmp_path / "a.safetensors")
    made = _layers(base, path)[TRANSFORMER]
    of_each = [_divided(module, tensor) for tensor in (weight, change, bias[:, None])]
    assert made.keys() == of_each[0].keys()
    for path_of, layer in made.items():
        before, expected, added = (found[path_of] for found in of_each)
        if isinstance(layer, LoraLayer):
            difference: Tensor | None = delta(layer.down, layer.up, layer.scale).float()
            own_bias = layer.bias
        else:
            difference, own_bias = weight_difference(layer, 1.0, before), layer.parts["bias"]
        assert difference is not None
        assert own_bias is not None
        assert torch.allclose(difference, expected, atol=1e-5)
        assert torch.equal(own_bias, added[:, 0])


def _divided(module: str, tensor: Tensor) -> dict[str, Tensor]:
    if module == _QKV:
        names = [f"transformer_blocks.0.attn.to_{letter}" for letter in "qkv"]
        return dict(zip(names, tensor.chunk(3), strict=True))
    shift, scale = tensor.chunk(2)
    return {"norm_out.linear": torch.cat([scale, shift])}


def _lora(module: str, inputs: int = _WIDTH, outputs: int = _WIDTH) -> dict[str, Tensor]:
    return {f"{module}.lora_down.weight": torch.ones(2, inputs), f"{module}.lora_up.weight": torch.ones(outputs, 2)}


_NAME = f"lora_unet_{_QKV.replace('.', '_')}"


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        (
            {f"{_NAME}.lokr_w1": torch.ones(4, 4), f"{_NAME}.lokr_w2": torch.ones(24, 8)},
            "factors of LoKr for several modules at once, transformer_blocks.0.attn.to_q, ",
        ),
        (
            _lora(_NAME, outputs=96) | {f"{_NAME}.dora_scale": torch.ones(1, _WIDTH)},
            "has a dora_scale for each input, which cannot be divided among transformer_blocks.0.attn.to_q, ",
        ),
        (
            {"lora_unet_transformer_blocks_0_attn_norm_q.w_norm": torch.ones(8)},
            "nothing in the file matches the base model; it has lora_unet_transformer_blocks_0_attn_norm_q",
        ),
        (_lora(_NAME), "transformer.joint_blocks.0.x_block.attn.qkv has the shape [96, 32] in the base model"),
        (
            _lora(_NAME, outputs=96) | _lora("lora_unet_transformer_blocks_0_attn_to_q"),
            "the file names modules in two ways",
        ),
        (
            _lora("unet.down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k", 2048),
            "the LoRA is for SDXL, and the base model is Stable Diffusion 3: nothing in the file matches",
        ),
        (
            _lora("lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q") | _lora("lora_te2_x"),
            "the LoRA is for SDXL, and the base model is Stable Diffusion 3: nothing in the file matches",
        ),
    ],
    ids=["LoKr", "dora_scale", "norms", "shapes", "two ways", "SDXL", "SDXL, kohya"],
)
def test_what_does_not_fit_is_refused_with_the_reason(
    base: Base, tmp_path: Path, tensors: Mapping[str, Tensor], says: str
) -> None:
    with pytest.raises(BadLora) as refused:
        _layers(base, save(tensors, tmp_path / "a.safetensors"))
    assert says in refused.value.message


@pytest.mark.parametrize(
    ("module", "width"), [(_NAME, _WIDTH), ("transformer.transformer_blocks.0.attn.to_q", 1536)], ids=["kohya", "PEFT"]
)
def test_sdxl_takes_none_of_its_loras(tmp_path: Path, module: str, width: int) -> None:
    path = save(_lora(module, width), tmp_path / "a.safetensors")
    with pytest.raises(BadLora, match=r"^the LoRA is for Stable Diffusion 3, and the base model is SDXL: nothing in"):
        convert(sources(path), base=read_base(WEIGHTS), family=base_family(WEIGHTS))


def test_layers_of_t5_need_a_model_with_t5(tmp_path: Path) -> None:
    base = read_base(family_model("SD 3 no T5"))
    path = LAYOUTS["kohya"](random_lora(family_model("SD 3"), seed=1), tmp_path)
    with pytest.raises(BadLora, match=r"tensors match nothing in the base model: lora_te3_encoder_block_0"):
        _layers(base, path)
    made = _layers(base, path, allow_partial=True)
    assert made["text_encoder"]
    assert made[TRANSFORMER]
    assert not made["text_encoder_3"]


def test_embeddings_are_refused_with_the_reason(tmp_path: Path) -> None:
    path = save({"clip_l": torch.ones(1, 32), "clip_g": torch.ones(1, 32)}, tmp_path / "toy.safetensors")
    source = LoraImportSource(path=str(path))
    call = LoraImportCall(base=str(family_model("SD 3.5")), output=str(tmp_path / "out"), sources=[source], name="toy")
    assert _answer(call).refusal == (
        "it is an embedding (textual inversion), and Stable Diffusion 3 reads none, as in Diffusers: use a LoRA instead"
    )
