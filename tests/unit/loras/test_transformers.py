"""LoRAs of transformers: every layout is converted to the same changes, and what cannot be is refused."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline, ZImagePipeline
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from bottega.addons.loras.engine import LoraLayer, WholeLayer, left_out_by_stock, stock_merges_alphas
from bottega.addons.loras.engine.lora import weight_difference
from bottega.addons.loras.wire import canonical
from bottega.errors import BadLora
from bottega.loras.importing.base import Base, read_base
from bottega.loras.importing.converting import convert, sources
from bottega.loras.importing.naming import base_family
from bottega.loras.importing.process import _answer
from bottega.miniature import WEIGHTS
from bottega.v1.lora_import_pb2 import LoraImportCall, LoraImportSource
from tests.samples.family_models import Z_IMAGE, family_model
from tests.samples.lora_files import base_shapes, canonical_layers, delta, low_rank, save
from tests.samples.transformer_loras import (
    LAYOUTS,
    ONLY_FLUX,
    TRANSFORMER,
    TransformerLora,
    fal_file,
    original_shapes,
    random_lora,
    repeat_outputs,
    unrepeat_outputs,
)
from tests.support.slow_cases import in_every_run

# Of the models for tests.
_WIDTH = 32
_QKV, _FINAL = "joint_blocks.0.x_block.attn.qkv", "final_layer.adaLN_modulation.1"


@pytest.fixture(scope="module")
def base() -> Base:
    return read_base(family_model("SD 3.5"))


def _layers(
    base: Base, path: Path, *, family: str = "SD 3.5", allow_partial: bool = False
) -> dict[str, dict[str, LoraLayer | WholeLayer]]:
    file = io.BytesIO()
    converted = convert(sources(path), base=base, family=base_family(family_model(family)), allow_partial=allow_partial)
    canonical.write(file, converted.modules)
    return canonical_layers(file.getvalue())


def _deltas(layers: Mapping[str, Mapping[str, LoraLayer | WholeLayer]]) -> dict[str, Tensor]:
    return {
        f"{component}.{path}": delta(layer.down, layer.up, layer.scale)
        for component, some in layers.items()
        for path, layer in low_rank(some).items()
    }


def _of(lora: TransformerLora) -> dict[str, Tensor]:
    """Return what a LoRA adds to each module, from its definition."""
    return {f"{of}.{path}": delta(down, up, lora.scale) for (of, path), (down, up) in lora.parts.items()}


def _assert_same(made: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert made.keys() == expected.keys()
    for name, value in made.items():
        assert torch.allclose(value, expected[name].double(), atol=1e-6), name


_FILES = [
    (family, layout)
    for family in ("SD 3.5", "Flux dev", "Flux schnell", "Flux Fill", Z_IMAGE)
    for layout in LAYOUTS
    if family.startswith("Flux") or layout not in ONLY_FLUX
]


@pytest.mark.parametrize(
    ("family", "layout"), in_every_run(_FILES, [file for file in _FILES if file[0] in {"SD 3.5", "Flux dev", Z_IMAGE}])
)
def test_every_layout_adds_what_its_definition_says(tmp_path: Path, family: str, layout: str) -> None:
    """What the authors' names mean, Diffusers' own converters say, which take them apart and swap."""
    folder = family_model(family)
    lora = random_lora(folder, seed=1, text=layout not in ONLY_FLUX)
    _assert_same(_deltas(_layers(read_base(folder), LAYOUTS[layout](lora, tmp_path), family=family)), _of(lora))
    paths = base_shapes(TRANSFORMER, folder)
    assert {path for of, path in lora.parts if of == TRANSFORMER} == paths.keys(), "of every layer"


def test_halves_of_the_texts_last_normalisation_are_swapped(base: Base, tmp_path: Path) -> None:
    """Stability's code has scale and shift in another order."""
    lora = random_lora(family_model("SD 3.5"), seed=1)
    made = _deltas(_layers(base, LAYOUTS["kohya"](lora, tmp_path)))
    swapped = made[f"{TRANSFORMER}.transformer_blocks.2.norm1_context.linear"]
    down, up = lora.originals["joint_blocks.2.context_block.adaLN_modulation.1"]
    assert torch.allclose(swapped[:_WIDTH], delta(down, up, lora.scale)[_WIDTH:])


def _read_by_stock(path: Path, pipeline: Any = FluxPipeline) -> dict[str, Tensor]:
    """Return what stock Diffusers' loader makes of a file of the transformer alone."""
    tensors = load_file(path)
    if pipeline is FluxPipeline:
        tensors = unrepeat_outputs(pipeline.lora_state_dict(repeat_outputs(tensors)))
    else:
        tensors = pipeline.lora_state_dict(tensors)
    ups = {name: up for name, up in tensors.items() if name.endswith(".lora_B.weight")}
    return {
        name.removesuffix(".lora_B.weight"): delta(tensors[name.replace("lora_B", "lora_A")], up, 1.0)
        for name, up in ups.items()
    }


def test_stock_reads_files_of_z_image_in_the_same_way(tmp_path: Path) -> None:
    """Where it leaves layers out, provenances say so."""
    folder = family_model(Z_IMAGE)
    path = LAYOUTS["kohya"](random_lora(folder, seed=1), tmp_path)
    layers = _layers(read_base(folder), path, family=Z_IMAGE)
    ours, theirs = _deltas(layers), _read_by_stock(path, ZImagePipeline)
    left_out = ours.keys() - theirs.keys()
    both = ours.keys() & theirs.keys()
    _assert_same({name: ours[name] for name in both}, {name: theirs[name] for name in both})
    said = set(left_out_by_stock(ZImagePipeline, TRANSFORMER, layers[TRANSFORMER]))
    assert {".".join(name.split(".")[:2]) for name in left_out} == said
    assert not stock_merges_alphas(ZImagePipeline, layers[TRANSFORMER])


@pytest.mark.parametrize("layout", ["kohya", "ComfyUI", "kohya, queries apart", "OneTrainer", "XLabs"])
def test_stock_reads_files_of_flux_in_the_same_way(tmp_path: Path, layout: str) -> None:
    """Where it leaves layers out, provenances say so. Of OneTrainer's names it understands those of attention."""
    folder = family_model("Flux dev")
    lora = random_lora(folder, seed=1, text=False)
    path = _xlabs_file(tmp_path) if layout == "XLabs" else LAYOUTS[layout.partition(",")[0]](lora, tmp_path)
    if layout == "OneTrainer":
        path = save({name: tensor for name, tensor in load_file(path).items() if "_attn_" in name}, path)
    if layout == "kohya, queries apart":
        path = save(_with_separate_factors(load_file(path)), path)
    layers = _layers(read_base(folder), path, family="Flux dev")
    ours, theirs = _deltas(layers), _read_by_stock(path)
    left_out = ours.keys() - theirs.keys()
    assert theirs.keys() - ours.keys() == {name.removeprefix("transformer.") for name in left_out}
    both = ours.keys() & theirs.keys()
    _assert_same({name: ours[name] for name in both}, {name: theirs[name] for name in both})
    said = set(left_out_by_stock(FluxPipeline, TRANSFORMER, layers[TRANSFORMER]))
    assert {".".join(name.split(".")[:2]) for name in left_out} == said
    assert bool(said) is (layout not in {"OneTrainer", "XLabs"})
    assert not stock_merges_alphas(FluxPipeline, layers[TRANSFORMER])


def _with_separate_factors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a file in which queries, keys, values and the MLP of a joined layer have separate factors."""
    made = dict(tensors)
    for name in (name for name in tensors if name.endswith(("qkv.lora_up.weight", "linear1.lora_up.weight"))):
        count, down = (3 if "qkv" in name else 4), name.replace("lora_up", "lora_down")
        rows = torch.tensor([*[_WIDTH] * 3, 4 * _WIDTH][:count])
        made[down] = torch.randn(count, tensors[down].shape[1], generator=torch.Generator().manual_seed(len(name)))
        own = functional.one_hot(torch.arange(count).repeat_interleave(rows))
        made[name] = own * tensors[name][:, :1]
        made[name.replace("lora_up.weight", "alpha")] = torch.tensor(3.0)
    return made


def _xlabs_file(folder: Path) -> Path:
    """Write a file of XLabs' trainer for a model of tests with two blocks of each kind."""
    generator = torch.Generator().manual_seed(1)
    shapes = {}
    for number in range(2):
        for place in (1, 2):
            shapes[f"double_blocks.{number}.processor.qkv_lora{place}"] = (3 * _WIDTH, _WIDTH)
            shapes[f"double_blocks.{number}.processor.proj_lora{place}"] = (_WIDTH, _WIDTH)
        shapes[f"single_blocks.{number}.processor.qkv_lora"] = (3 * _WIDTH, _WIDTH)
        shapes[f"single_blocks.{number}.processor.proj_lora"] = (_WIDTH, 5 * _WIDTH)
    tensors = {}
    for name, (outputs, inputs) in shapes.items():
        tensors[f"{name}.down.weight"] = torch.randn(2, inputs, generator=generator)
        tensors[f"{name}.up.weight"] = torch.randn(outputs, 2, generator=generator)
    return save(tensors, folder / "xlabs.safetensors")


@pytest.mark.slow
def test_stock_reads_files_of_fals_trainer_in_the_same_way(tmp_path: Path) -> None:
    """Diffusers' converter wants all blocks of the published model."""
    folder = tmp_path / "flux"
    (folder / TRANSFORMER).mkdir(parents=True)
    config = json.loads((family_model("Flux dev") / TRANSFORMER / "config.json").read_text())
    config |= {"num_layers": 19, "num_single_layers": 38}
    (folder / TRANSFORMER / "config.json").write_text(json.dumps(config))
    lora = random_lora(folder, seed=1, text=False, rank=1)
    weights = {f"{path}.weight": up @ down for (_, path), (down, up) in lora.parts.items()}
    save(weights, folder / TRANSFORMER / "diffusion_pytorch_model.safetensors")
    trained = {name for name in original_shapes(config) if "_blocks." in name or name == "final_layer.linear"}
    some = TransformerLora(
        originals={name: part for name, part in lora.originals.items() if name in trained}, text={}, rank=1, alpha=0.5
    )
    path = fal_file(some, tmp_path)
    _assert_same(_deltas(_layers(read_base(folder), path, family="Flux dev")), _read_by_stock(path))


@pytest.mark.parametrize("name", ["img_in", "lora_unet_img_in", "transformer.x_embedder"])
def test_fill_takes_what_dev_reads_of_a_token(tmp_path: Path, name: str) -> None:
    """As in Diffusers, other inputs of it are not changed."""
    folder = family_model("Flux Fill")
    down, up = torch.ones(2, 64), torch.ones(_WIDTH, 2)
    path = save({f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}, tmp_path / "a.safetensors")
    (layer,) = low_rank(_layers(read_base(folder), path, family="Flux Fill")[TRANSFORMER]).values()
    assert layer.down.shape == (2, base_shapes(TRANSFORMER, folder)["x_embedder"][1])
    assert torch.equal(layer.down[:, :64], down)
    assert not layer.down[:, 64:].any()


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        (
            {"img_in.lora_A.weight": torch.ones(2, 128), "img_in.lora_B.weight": torch.ones(_WIDTH, 2)},
            "transformer.x_embedder reads 64 values of each token, and the LoRA changes 128: it is for a model that",
        ),
        (
            {"img_in.lora_A.weight": torch.ones(2, 128), "double_blocks.0.img_attn.norm.key_norm.scale": torch.ones(8)},
            "the file is a control LoRA, such as those of FLUX.1 Canny and Depth, which make the model read a control ",
        ),
        (
            {
                f"single_blocks.0.{name}.{part}.weight": torch.ones(*shape)
                for name, outputs in (("linear1", 7), ("qkv", 3))
                for part, shape in (("lora_A", (2, _WIDTH)), ("lora_B", (outputs * _WIDTH, 2)))
            },
            "the file changes transformer.single_transformer_blocks.0.attn.to_q twice, by different names: save it ",
        ),
        (
            {"lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight": torch.ones(2, 3072)},
            "transformer.double_blocks.0.img_attn.qkv lacks up",
        ),
        (
            {"lora_unet_double_blocks_7_img_attn_qkv.lora_down.weight": torch.ones(2, _WIDTH)},
            "nothing in the file matches the base model; it has lora_unet_double_blocks_7_img_attn_qkv.lora_down",
        ),
        (
            {"base_model.model.single_transformer_blocks.0.attn.to_q.lora_A.weight": torch.ones(2, _WIDTH)}
            | {"base_model.model.single_transformer_blocks.0.attn.to_q.lora_B.weight": torch.ones(_WIDTH, 2)},
            "the file is PEFT's, whose alpha is in adapter_config.json: upload the folder that has both",
        ),
        (
            {"lora_unet_joint_blocks_0_x_block_attn_qkv.lora_down.weight": torch.ones(2, 1536)},
            "the LoRA is for Stable Diffusion 3, and the base model is Flux.1: nothing in the file matches the base ",
        ),
        (
            {"clip_l": torch.ones(1, 32)},
            "it is an embedding (textual inversion), and none are served with Flux.1: use a LoRA instead",
        ),
    ],
    ids=["wider", "control", "twice", "half", "no block", "PEFT", "SD 3", "embedding"],
)
def test_what_does_not_fit_flux_is_refused_with_the_reason(
    tmp_path: Path, tensors: Mapping[str, Tensor], says: str
) -> None:
    source = LoraImportSource(path=str(save(tensors, tmp_path / "a.safetensors")))
    call = LoraImportCall(base=str(family_model("Flux dev")), output=str(tmp_path / "out"), sources=[source], name="a")
    assert _answer(call).refusal.startswith(says)


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
def test_sdxl_takes_no_loras_of_sd3(tmp_path: Path, module: str, width: int) -> None:
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
        "it is an embedding (textual inversion), and none are served with Stable Diffusion 3: use a LoRA instead"
    )
