"""LoHa, LoKr, DoRA, full differences and convolutions: each adds to a weight what its published definition says."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import UNet2DConditionModel
from numpy.typing import NDArray
from peft import LoHaConfig, LoKrConfig, LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor

from bottega.addons.loras.engine import LoraAtScale, make_set
from bottega.addons.loras.wire import canonical
from bottega.errors import BadLora
from bottega.loras.importing.base import Base, read_base
from bottega.loras.importing.converting import convert, sources
from bottega.miniature import WEIGHTS
from tests.samples.lora_files import canonical_layers, save

_Q = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
_OUT = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_out.0"
_CONV = "down_blocks.0.resnets.0.conv1"
_NAME = f"lora_unet_{_Q.replace('.', '_')}"
_RANK = 3

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def base() -> Base:
    return read_base(WEIGHTS)


def _unet() -> Any:
    return UNet2DConditionModel.from_pretrained(WEIGHTS / "unet", use_safetensors=True, dtype=torch.float32)


@pytest.fixture(scope="module")
def unet() -> Any:
    return _unet()


def _canonical(path: Path, base: Base) -> bytes:
    file = io.BytesIO()
    canonical.write(file, convert(sources(path), base=base).modules)
    return file.getvalue()


def _changes(path: Path, base: Base, unet: Any, strength: float = 1.0) -> Tensors:
    """Return what the engine adds to each parameter of the UNet."""
    use = LoraAtScale(digest="a", scale=strength, layers=canonical_layers(_canonical(path, base)))
    made = make_set([use], {"unet": unet}, ["unet"])
    added = {}
    for name, factors in made.of("unet").items():
        weight = unet.get_submodule(name).weight
        added[f"{name}.weight"] = (factors.up @ factors.down.flatten(1)).view_as(weight)
    for name, difference in made.differences_of("unet").items():
        if difference.weight is not None:
            added[f"{name}.weight"] = difference.weight
        if difference.bias is not None:
            added[f"{name}.bias"] = difference.bias
    return added


def _assert_same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert theirs[name].abs().max() > 1e-3
        assert (value - theirs[name]).abs().max() < 1e-5, name


def _randomise(model: Any) -> None:
    generator = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        if any(mark in name for mark in ("lora_", "hada_", "lokr_")):
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.data = parameter.data + noise if "magnitude" in name else noise


_TARGETS = ["attn1.to_q", "conv1", "proj_in"]


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(r=4, lora_alpha=2, target_modules=_TARGETS, use_dora=True),
        LoHaConfig(r=4, alpha=2, target_modules=_TARGETS, use_effective_conv2d=True),
        LoKrConfig(r=4, alpha=2, target_modules=_TARGETS, decompose_both=True, rank_pattern={"conv1": 2}),
        LoKrConfig(r=2, alpha=3, target_modules=_TARGETS, use_effective_conv2d=True, alpha_pattern={"conv1": 7}),
        LoKrConfig(r=400, alpha=3, target_modules=_TARGETS),
    ],
    ids=["DoRA", "LoHa with Tucker", "LoKr", "LoKr with Tucker", "LoKr of whole factors"],
)
def test_a_folder_of_peft_adds_what_peft_adds(base: Base, unet: Any, tmp_path: Path, config: Any) -> None:
    strength = 0.6
    model = get_peft_model(_unet(), config)
    _randomise(model)
    model.save_pretrained(tmp_path)
    ours = _changes(tmp_path, base, unet, strength)
    for module in model.modules():
        if isinstance(module, BaseTunerLayer) and hasattr(module, "set_scale"):
            module.set_scale("default", strength)
    merged = dict(model.merge_and_unload().named_parameters())
    theirs = {
        name: merged[name] - value for name, value in unet.named_parameters() if not torch.equal(merged[name], value)
    }
    _assert_same(ours, theirs)


def _draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.3


def _kohya(path: str, parts: Mapping[str, Tensor]) -> Tensors:
    return {f"lora_unet_{path.replace('.', '_')}.{part}": tensor for part, tensor in parts.items()}


def _arrays(parts: Mapping[str, Tensor]) -> dict[str, NDArray[np.float64]]:
    return {part: tensor.double().numpy() for part, tensor in parts.items()}


def _factors(unet: Any, path: str, kind: str) -> Tensors:
    """Return random tensors of a kind for a module, as LyCORIS writes them."""
    out, inputs, *kernel = unet.get_submodule(path).weight.shape
    columns = inputs * int(np.prod(kernel))
    shapes: dict[str, dict[str, tuple[int, ...]]] = {
        "LoCon": {"lora_down.weight": (_RANK, inputs, *kernel), "lora_up.weight": (out, _RANK, *[1] * len(kernel))},
        "LoCon with mid": {
            "lora_down.weight": (_RANK, inputs, 1, 1),
            "lora_mid.weight": (_RANK, _RANK, *kernel),
            "lora_up.weight": (out, _RANK, 1, 1),
        },
        "LoKr": {
            "lokr_w1": (4, 8),
            "lokr_w2_a": (out // 4, _RANK),
            "lokr_w2_b": (_RANK, columns // 8),
        },
        "full difference": {"diff": (out, inputs, *kernel)},
    }
    tensors = {part: _draw(*shape, seed=seed) for seed, (part, shape) in enumerate(shapes[kind].items())}
    if kind != "full difference":
        tensors["alpha"] = torch.tensor(2.0)
    return tensors


def _by_hand(kind: str, parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> NDArray[Any]:
    """Return what a kind adds to a weight, by its definition."""
    of = _arrays(parts)
    scale = 2.0 / _RANK
    match kind:
        case "LoCon":
            low = of["lora_down.weight"].reshape(_RANK, -1)
            return scale * (of["lora_up.weight"].reshape(-1, _RANK) @ low).reshape(shape)
        case "LoCon with mid":
            up, down = of["lora_up.weight"][:, :, 0, 0].T, of["lora_down.weight"][:, :, 0, 0]
            # LyCORIS' rebuild_tucker.
            rebuilt: NDArray[Any] = np.einsum("ijhw,ip,jr->prhw", of["lora_mid.weight"], up, down)
            return scale * rebuilt
        case "LoKr":
            inner = (of["lokr_w2_a"] @ of["lokr_w2_b"]).reshape(shape[0] // 4, shape[1] // 8, *shape[2:])
            return scale * np.kron(of["lokr_w1"].reshape(4, 8, *[1] * (inner.ndim - 2)), inner)
    return of["diff"]


def test_differences_of_norms_are_added_to_weights_and_biases(base: Base, unet: Any, tmp_path: Path) -> None:
    """LyCORIS' NormModule: the weight plus w_norm, and the bias plus b_norm. Others write them as diff and diff_b."""
    strength = 0.7
    names = {
        "lora_unet_down_blocks_0_resnets_0_norm1": "down_blocks.0.resnets.0.norm1",
        "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_norm3": (
            "down_blocks.1.attentions.0.transformer_blocks.0.norm3"
        ),
        "lora_unet_conv_norm_out": "conv_norm_out",
    }
    tensors, expected = {}, {}
    for seed, (name, path) in enumerate(names.items()):
        for kind, ours, theirs in (("weight", "w_norm", "diff"), ("bias", "b_norm", "diff_b")):
            drawn = _draw(*unet.get_submodule(path).weight.shape, seed=2 * seed + len(kind))
            tensors[f"{name}.{theirs if path == 'conv_norm_out' else ours}"] = drawn
            expected[f"{path}.{kind}"] = strength * drawn
    _assert_same(_changes(save(tensors, tmp_path / "a.safetensors"), base, unet, strength), expected)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"lora_unet_conv_norm_out.w_norm": (5,)}, "its full difference, [5], does not fit it"),
        ({"lora_unet_conv_norm_out.b_norm": (5,)}, "lora_unet_conv_norm_out.b_norm has the shape [5]"),
        (
            {"lora_unet_conv_norm_out.lora_down.weight": (2, 4), "lora_unet_conv_norm_out.lora_up.weight": (4, 2)},
            "unet.conv_norm_out is a normalisation layer, and cannot have factors of LoRA",
        ),
        (
            {"lora_unet_conv_norm_out.w_norm": (32,), "lora_unet_conv_norm_out.diff": (32,)},
            "lora_unet_conv_norm_out.diff and lora_unet_conv_norm_out.w_norm are the same part",
        ),
    ],
)
def test_differences_of_norms_that_do_not_fit_are_refused(
    base: Base, tmp_path: Path, tensors: dict[str, tuple[int, ...]], says: str
) -> None:
    path = save({name: torch.ones(shape) for name, shape in tensors.items()}, tmp_path / "a.safetensors")
    with pytest.raises(BadLora) as refused:
        convert(sources(path), base=base)
    assert says in refused.value.message


# Other kinds are compared with PEFT, above.
_CASES = [
    *((path, kind, "nothing") for path in (_Q, _CONV) for kind in ("LoCon", "LoKr", "full difference")),
    (_CONV, "LoCon with mid", "nothing"),
    *((path, kind, per) for path in (_Q, _CONV) for kind in ("LoCon", "LoKr") for per in ("output", "input")),
]


@pytest.mark.parametrize(("path", "kind", "per"), _CASES)
def test_a_file_of_lycoris_adds_what_its_definition_says(
    base: Base, unet: Any, tmp_path: Path, path: str, kind: str, per: str
) -> None:
    """With DoRA, norms are for each output or for each input, and a strength scales the whole difference."""
    strength = 0.7
    parts = _factors(unet, path, kind)
    weight = unet.get_submodule(path).weight.detach().double().numpy()
    expected = _by_hand(kind, parts, weight.shape)
    if per != "nothing":
        axes = tuple(axis for axis in range(weight.ndim) if axis != (0 if per == "output" else 1))
        norms = np.sqrt((weight**2).sum(axis=axes, keepdims=True))
        parts["dora_scale"] = torch.from_numpy(norms * 1.3).float()
        total = weight + expected
        expected = total * (norms * 1.3) / np.sqrt((total**2).sum(axis=axes, keepdims=True)) - weight
    file = save(_kohya(path, parts), tmp_path / "a.safetensors")
    ours = _changes(file, base, unet, strength)
    _assert_same(ours, {f"{path}.weight": torch.from_numpy(strength * expected).float()})


def test_a_difference_of_a_bias_is_added_to_the_bias(base: Base, unet: Any, tmp_path: Path) -> None:
    parts = {**_factors(unet, _CONV, "LoCon"), "diff_b": _draw(unet.get_submodule(_CONV).bias.shape[0], seed=5)}
    ours = _changes(save(_kohya(_CONV, parts), tmp_path / "a.safetensors"), base, unet, 0.5)
    assert ours.keys() == {f"{_CONV}.weight", f"{_CONV}.bias"}
    assert torch.equal(ours[f"{_CONV}.bias"], 0.5 * parts["diff_b"])
    alone = _changes(save(_kohya(_OUT, {"diff_b": _draw(96, seed=6)}), tmp_path / "b.safetensors"), base, unet)
    assert alone.keys() == {f"{_OUT}.bias"}


_SHAPE = f"unet.{_Q} has the shape [96, 96] in the base model;"
_HADA = {f"hada_w{n}_{side}": torch.ones(shape) for n in (1, 2) for side, shape in (("a", (96, 2)), ("b", (2, 96)))}
_LOKR = {"lokr_w1": torch.ones(4, 8), "lokr_w2": torch.ones(24, 12)}
_LORA = {"lora_down.weight": torch.ones(2, 96), "lora_up.weight": torch.ones(96, 2)}


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        (_HADA | {"hada_w1_a": None}, f"unet.{_Q} lacks hada_w1_a"),
        (
            _HADA | {"hada_w2_b": torch.full((2, 96), torch.nan)},
            f"{_NAME}.hada_w2_b has elements that are not finite (NaN or infinity)",
        ),
        (
            _HADA | {"hada_w1_a": torch.ones(96, 0), "hada_w1_b": torch.ones(0, 96)},
            f"unet.{_Q}: hada_w1_b has the shape [0, 96], which has no rank",
        ),
        (_HADA | {"hada_w1_b": torch.ones(2, 2, 96)}, f"unet.{_Q}: hada_w1_a and hada_w1_b are not matrices"),
        (
            {name: tensor * 1e12 for name, tensor in _HADA.items()},
            f"unet.{_Q}: alpha / rank * up @ down may reach 4e+48, beyond the range of F32",
        ),
        (
            _HADA | {"hada_w2_a": torch.ones(96, 3), "hada_w2_b": torch.ones(3, 48)},
            f"{_SHAPE} down, [3, 48], and up, [96, 3], do not fit it",
        ),
        (_LOKR | {"lokr_w1": torch.ones(5, 8)}, f"{_SHAPE} its factors of LoKr, [5, 8], do not fit it"),
        (_LOKR | {"lokr_w2": torch.ones(24, 13)}, f"{_SHAPE} its factors of LoKr, [4, 8] and [24, 13], do not fit it"),
        (
            {"lokr_w1_a": torch.ones(5, 2), "lokr_w1_b": torch.ones(3, 5), "lokr_w2": torch.ones(8, 8)},
            f"{_SHAPE} its factors of LoKr, [5, 2] and [3, 5], do not fit it",
        ),
        (
            {"lokr_w1_a": torch.ones(4000, 2), "lokr_w1_b": torch.ones(2, 9000), "lokr_w2": torch.ones(24, 12)},
            f"{_SHAPE} its factors of LoKr, [4000, 9000], do not fit it",
        ),
        ({"lokr_w1": torch.ones(4, 8)}, f"unet.{_Q} lacks lokr_w2_a and lokr_w2_b"),
        (
            {"lokr_w1_a": torch.full((4, 2), 1e30), "lokr_w1_b": torch.full((2, 8), 1e30), "lokr_w2": _LOKR["lokr_w2"]},
            f"unet.{_Q}: the product of lokr_w1_a and lokr_w1_b is beyond the range of F32",
        ),
        ({"diff": torch.ones(96, 95)}, f"{_SHAPE} its full difference, [96, 95], does not fit it"),
        (
            {"diff": torch.ones(96, 96), "alpha": torch.tensor(1.0)},
            f"unet.{_Q} has a full difference and an alpha, which has no meaning there",
        ),
        (
            _LORA | {"lora_magnitude_vector": torch.ones(95)},
            f"{_SHAPE} the magnitudes of DoRA in {_NAME}.lora_magnitude_vector, [95], do not fit it",
        ),
        (
            _LORA | {"dora_scale": torch.ones(96, 1), "lora_magnitude_vector": torch.ones(96)},
            f"unet.{_Q} has magnitudes of DoRA twice, or without factors",
        ),
        (
            _LORA | {"diff_b": torch.ones(96)},
            f"{_NAME}.diff_b is one of the full differences of weights for a bias, which unet.{_Q} does not have",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(
    base: Base, tmp_path: Path, parts: Mapping[str, Tensor | None], says: str
) -> None:
    tensors = _kohya(_Q, {part: tensor for part, tensor in parts.items() if tensor is not None})
    with pytest.raises(BadLora) as refused:
        _canonical(save(tensors, tmp_path / "a.safetensors"), base)
    assert refused.value.message == says


def test_a_configuration_of_another_kind_is_refused(base: Base, tmp_path: Path) -> None:
    tensors = {f"base_model.model.{_Q}.lora_{side}.weight": torch.zeros(2, 96 if side == "A" else 2) for side in "AB"}
    save(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LOHA"}')
    with pytest.raises(BadLora) as refused:
        _canonical(tmp_path, base)
    assert refused.value.message == (f"adapter_config.json says peft_type LOHA, but unet.{_Q} has factors of LoRA")
    save(
        {f"base_model.model.{_Q}.{part}": tensor for part, tensor in _LOKR.items()},
        tmp_path / "adapter_model.safetensors",
    )
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LOKR"}')
    with pytest.raises(BadLora) as refused:
        _canonical(tmp_path, base)
    assert refused.value.message == f"unet.{_Q} has no rank, and adapter_config.json does not say one"


def _middle(rank: int, *kernel: int) -> Tensors:
    sides = {"down": (rank, 48, 1, 1), "mid": (rank, rank, *kernel), "up": (48, rank, 1, 1)}
    return _kohya(_CONV, {f"lora_{part}.weight": torch.ones(shape) for part, shape in sides.items()})


def test_a_middle_factor_of_too_high_a_rank_is_not_multiplied(base: Base, tmp_path: Path) -> None:
    began = time.process_time()
    with pytest.raises(BadLora, match="has rank 600; the maximum is 512"):
        _canonical(save(_middle(600, 3, 3), tmp_path / "a.safetensors"), base)
    assert time.process_time() - began < 1  # s; the product takes several


def test_a_middle_factor_is_not_expanded_beyond_the_modules_kernel(base: Base, tmp_path: Path) -> None:
    with pytest.raises(BadLora, match=r"the middle factor \(lora_mid\) has the shape \[1, 1, 2000, 2000\]"):
        _canonical(save(_middle(1, 2000, 2000), tmp_path / "a.safetensors"), base)
