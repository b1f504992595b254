"""Untrusted LoRAs become canonical: the same deltas as their definition says, and as Diffusers and PEFT load them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionXLPipeline, UNet2DConditionModel
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor

from bottega.addons.loras.engine import left_out_by_stock, stock_merges_alphas
from bottega.addons.loras.wire import canonical
from bottega.errors import BadLora, ConfigError
from bottega.loras.importing.base import Base, BaseModule, read_base
from bottega.loras.importing.converting import ConvertedLora, convert, sources
from bottega.miniature import WEIGHTS
from tests.samples.lora_files import (
    SDXL_COMPONENTS,
    Part,
    base_shapes,
    canonical_deltas,
    canonical_layers,
    delta,
    factors,
    kohya,
    names_of,
    peft,
    save,
)

_Q = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
_OUT = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_out.0"
_CONV = "down_blocks.0.resnets.0.conv1"
_K = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_k"
_TEXT = "encoder.layers.0.self_attn.q_proj"
_FC1 = "encoder.layers.0.mlp.fc1"


Importing = Callable[..., dict[str, Tensor]]
"""Imports a file, perhaps with a configuration, and returns what it adds to each module."""


@pytest.fixture(scope="module")
def base() -> Base:
    return read_base(WEIGHTS)


@pytest.fixture
def imported(base: Base, tmp_path: Path) -> Importing:
    def run(source: Path, adapter_config: bytes = b"") -> dict[str, Tensor]:
        converted = convert(sources(source, adapter_config), base=base)
        return _deltas(converted, tmp_path)

    return run


def _deltas(converted: ConvertedLora, folder: Path) -> dict[str, Tensor]:
    path = folder / "canonical.safetensors"
    with path.open("wb") as file:
        canonical.write(file, converted.modules)
    return canonical_deltas(path)


def _assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], *, atol: float = 1e-7) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.allclose(value, theirs[name].double(), rtol=1e-5, atol=atol), name


def test_kohya_of_every_module_with_mixed_alphas_is_what_the_definition_says(
    imported: Importing, tmp_path: Path
) -> None:
    parts = {
        (component, path): Part(rank=1 + place % 4, alpha=(None, 0.5, 8.0, 0.0, -3.0)[place % 5])
        for component in SDXL_COMPONENTS
        for place, path in enumerate(base_shapes(component))
    }
    tensors, expected = kohya(parts)
    assert {path.rpartition(".")[2] for path in names_of(expected, "unet")} > {"to_q", "proj", "conv1", "conv_shortcut"}
    _assert_same(imported(save(tensors, tmp_path / "kohya.safetensors")), expected)


@pytest.mark.filterwarnings("ignore:The following alpha_pattern keys did not match")
@pytest.mark.parametrize(
    ("parts", "unlike"),
    [
        ({("unet", _CONV): 2.0, ("unet", _OUT): 2.0, ("unet", _Q): 8.0}, {f"unet.{_Q}": 4}),
        ({("unet", path): 2.0 for path in (_Q, "add_embedding.linear_1")}, {"unet.add_embedding.linear_1": None}),
        ({("text_encoder", path): 2.0 for path in (_TEXT, _FC1)}, {f"text_encoder.{_TEXT}": None}),
        ({("text_encoder", path): 2.0 for path in (_TEXT, _FC1, _TEXT.replace("q_proj", "out_proj"))}, {}),
    ],
    ids=["mixed alphas", "add_embedding", "text without out_proj", "text"],
)
def test_stock_diffusers_reads_kohyas_files_otherwise_as_provenances_say(
    imported: Importing,
    tmp_path: Path,
    parts: dict[tuple[str, str], float],
    unlike: dict[str, int | None],
) -> None:
    """Where this fails, provenances and the page on LoRAs may say so no more. unlike: how many times stock's counts
    here; None is what stock leaves out."""
    tensors, _ = kohya({where: Part(rank=2, alpha=alpha) for where, alpha in parts.items()})
    path = save(tensors, tmp_path / "kohya.safetensors")
    pipeline = _pipeline()
    pipeline.load_lora_weights(path, use_safetensors=True)
    theirs, ours = _loaded_deltas(pipeline), imported(path)
    assert ours.keys() - theirs.keys() == {name for name, times in unlike.items() if times is None}
    expected = {name: (unlike.get(name) or 1) * value for name, value in theirs.items()}
    _assert_same({name: ours[name] for name in theirs}, expected)
    layers = canonical_layers((tmp_path / "canonical.safetensors").read_bytes())
    assert any(stock_merges_alphas(StableDiffusionXLPipeline, each) for each in layers.values()) == any(unlike.values())
    left_out = [
        what for name, each in layers.items() for what in left_out_by_stock(StableDiffusionXLPipeline, name, each)
    ]
    assert bool(left_out) == (None in unlike.values())


def test_kohyas_own_names_of_the_unet_mean_the_same_modules(imported: Importing, tmp_path: Path) -> None:
    # The second block's first layer: after one level of two layers and a halving.
    tensors, expected = kohya({("unet", _Q): Part(rank=2, alpha=1.0), ("unet", _CONV): Part(rank=2, alpha=4.0)})
    renamed = {
        name.replace(_Q.replace(".", "_"), "input_blocks_4_1_transformer_blocks_0_attn1_to_q").replace(
            _CONV.replace(".", "_"), "input_blocks_1_0_in_layers_2"
        ): tensor
        for name, tensor in tensors.items()
    }
    assert renamed.keys() != tensors.keys()
    _assert_same(imported(save(renamed, tmp_path / "a.safetensors")), expected)


@pytest.mark.parametrize(
    ("dtype", "name_of_it"), [(torch.float32, "F32"), (torch.float16, "F16"), (torch.bfloat16, "BF16")]
)
def test_element_types_are_kept(
    base: Base, tmp_path: Path, dtype: torch.dtype, name_of_it: str, imported: Importing
) -> None:
    tensors, _ = kohya({("unet", _Q): Part(rank=2, alpha=1.0)})
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    path = save(tensors, tmp_path / "a.safetensors")
    (module,) = convert(sources(path), base=base).modules
    assert {weights.dtype for weights in module.parts.values()} == {name_of_it}
    name = f"lora_unet_{_Q.replace('.', '_')}"
    expected = delta(tensors[f"{name}.lora_down.weight"], tensors[f"{name}.lora_up.weight"], 0.5)
    _assert_same(imported(path), {f"unet.{_Q}": expected})


def test_matrices_written_as_convolutions_of_one_by_one_are_taken(imported: Importing, tmp_path: Path) -> None:
    tensors, expected = kohya({("unet", _Q): Part(rank=2, alpha=1.0)})
    wide = {name: tensor[..., None, None] if tensor.dim() == 2 else tensor for name, tensor in tensors.items()}
    _assert_same(imported(save(wide, tmp_path / "a.safetensors")), expected)


def _unet() -> Any:
    return UNet2DConditionModel.from_pretrained(WEIGHTS / "unet", use_safetensors=True, dtype=torch.float32)


def _pipeline() -> Any:
    return StableDiffusionXLPipeline.from_pretrained(
        WEIGHTS, local_files_only=True, use_safetensors=True, dtype=torch.float32
    )


def _loaded_deltas(pipeline: Any) -> dict[str, Tensor]:
    """What Diffusers has loaded adds to each module."""
    shapes = {component: base_shapes(component) for component in SDXL_COMPONENTS}
    found = {}
    for component in SDXL_COMPONENTS:
        for path, module in getattr(pipeline, component).named_modules():
            if isinstance(module, LoraLayer) and module.active_adapters and module.lora_A:
                (adapter,) = module.lora_A
                spelled = next(
                    s for s in (path, f"text_model.{path}", path.removeprefix("text_model.")) if s in shapes[component]
                )
                found[f"{component}.{spelled}"] = module.get_delta_weight(adapter).detach()
    return found


def _randomise(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA of UNet and both text encoders, with alphas of its own, as Diffusers saves it."""
    from diffusers.training_utils import _collate_lora_metadata
    from peft.utils import get_peft_model_state_dict

    folder = tmp_path_factory.mktemp("diffusers")
    pipeline = _pipeline()
    unet = LoraConfig(r=4, lora_alpha=2, target_modules=["to_q", "to_out.0", "conv1"], alpha_pattern={"conv1": 8})
    text = LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "fc1"])
    modules = {"unet": pipeline.unet, "text_encoder": pipeline.text_encoder, "text_encoder_2": pipeline.text_encoder_2}
    for seed, (component, module) in enumerate(modules.items()):
        module.add_adapter(unet if component == "unet" else text)
        _randomise(module, seed)
    StableDiffusionXLPipeline.save_lora_weights(
        folder,
        unet_lora_layers=get_peft_model_state_dict(pipeline.unet),
        text_encoder_lora_layers=get_peft_model_state_dict(pipeline.text_encoder),
        text_encoder_2_lora_layers=get_peft_model_state_dict(pipeline.text_encoder_2),
        **_collate_lora_metadata(modules),
    )
    return folder


def test_what_diffusers_saved_is_what_diffusers_loads(imported: Importing, saved: Path) -> None:
    pipeline = _pipeline()
    pipeline.load_lora_weights(saved, use_safetensors=True)
    theirs = _loaded_deltas(pipeline)
    assert {name.partition(".")[0] for name in theirs} == set(SDXL_COMPONENTS)
    _assert_same(imported(saved), theirs)


def test_the_first_naming_of_diffusers_is_what_diffusers_loads(imported: Importing, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(2)
    shapes = base_shapes("unet")
    tensors: dict[str, Tensor] = {}
    for path, old in ((_Q, "to_q_lora"), (_OUT, "to_out_lora")):
        down, up = factors(shapes[path], 3, generator=generator)
        place = path.removesuffix(".to_q").removesuffix(".to_out.0")
        tensors |= {f"unet.{place}.processor.{old}.down.weight": down, f"unet.{place}.processor.{old}.up.weight": up}
    down, up = factors(base_shapes("text_encoder")[_TEXT], 3, generator=generator)
    text = "text_encoder.text_model.encoder.layers.0.self_attn.q_proj.lora_linear_layer"
    tensors |= {f"{text}.down.weight": down, f"{text}.up.weight": up}
    source = save(tensors, tmp_path / "pytorch_lora_weights.safetensors")
    pipeline = _pipeline()
    pipeline.load_lora_weights(tmp_path, use_safetensors=True)
    theirs = _loaded_deltas(pipeline)
    assert len(theirs) == 3
    _assert_same(imported(source), theirs)


@pytest.mark.parametrize(
    "options",
    [
        {"alpha_pattern": {"ff.net.2": 16}, "rank_pattern": {"to_k": 2}, "use_rslora": True},
        {"alpha_pattern": {f"^{_K}": 100, ".*attn1.to_k": 5, "attn2.to_k$": 7}, "rank_pattern": {f"^{_K}": 3}},
        {"alpha_pattern": {r"mid_block\.resnets\.0\.conv2": 3}, "rank_pattern": {"(to_k|conv2)": 2}},
        {"lora_alpha": -3, "init_lora_weights": "gaussian"},
    ],
    ids=str,
)
def test_a_folder_of_peft_is_what_peft_loads(imported: Importing, tmp_path: Path, options: dict[str, Any]) -> None:
    chosen = {"r": 4, "lora_alpha": 2, "target_modules": ["to_k", "ff.net.2", "conv2"], **options}
    model = get_peft_model(_unet(), LoraConfig(**chosen))
    _randomise(model, 3)
    model.save_pretrained(tmp_path)
    # Loaded again: PEFT sorts the keys of patterns when it saves them, and the first one that matches counts.
    theirs = _added(PeftModel.from_pretrained(_unet(), tmp_path).get_base_model())
    _assert_same(imported(tmp_path), theirs)
    alone = imported(tmp_path / "adapter_model.safetensors", (tmp_path / "adapter_config.json").read_bytes())
    _assert_same(alone, theirs)


def test_what_a_network_saved_itself_is_what_it_loads(imported: Importing, tmp_path: Path) -> None:
    """Without a component before its names, in the tensors and in the metadata alike."""
    unet = _unet()
    patterns = {"alpha_pattern": {f"^{_K}": 100, "conv1": 1}, "rank_pattern": {"conv1": 2}}
    unet.add_adapter(LoraConfig(r=2, lora_alpha=8, target_modules=["to_k", "conv1"], **patterns))
    _randomise(unet, 5)
    unet.save_lora_adapter(tmp_path)
    loading = _unet()
    loading.load_lora_adapter(tmp_path, prefix=None, use_safetensors=True)
    theirs = _added(loading)
    assert all(torch.equal(value, theirs[name]) for name, value in _added(unet).items())
    _assert_same(imported(tmp_path), theirs)


def _added(unet: torch.nn.Module) -> dict[str, Tensor]:
    """What the only adapter adds to each module of the UNet."""
    found = {}
    for path, module in unet.named_modules():
        if isinstance(module, LoraLayer):
            (adapter,) = module.active_adapters
            found[f"unet.{path}"] = module.get_delta_weight(adapter).detach()
    return found


def test_a_first_file_without_tensors_leaves_those_of_the_second(base: Base, tmp_path: Path) -> None:
    peft({("unet", _Q): Part(rank=2, alpha=1.0)}, tmp_path / "whole")
    empty = save({}, tmp_path / "empty.safetensors", {"format": "pt"})
    files = [*sources(empty), *sources(tmp_path / "whole")]
    assert [module.path for module in convert(files, base=base).modules] == [_Q]
    with pytest.raises(BadLora, match="nothing in the file matches the base model: it has no tensors"):
        convert(sources(empty), base=base)


def _refused(base: Base, tensors: dict[str, Tensor], folder: Path, **given: Any) -> str:
    path = save(tensors, folder / "bad.safetensors", given.pop("metadata", None))
    with pytest.raises(BadLora) as refused:
        _import(path, given.get("adapter_config", b""), base)
    return refused.value.message


def _import(path: Path, adapter_config: bytes, base: Base) -> None:
    canonical.write(io.BytesIO(), convert(sources(path, adapter_config), base=base).modules)


_NAME = f"lora_unet_{_Q.replace('.', '_')}"
_SHAPED = f"unet.{_Q} has the shape [96, 96] in the base model;"
_SHAPES = (("down", (2, 96)), ("up", (96, 2)))


def test_a_lora_that_matches_in_part_is_refused_with_the_list(base: Base, tmp_path: Path) -> None:
    tensors, _ = kohya({("unet", _Q): Part(rank=2, alpha=1.0)})
    extra = {f"lora_unet_down_blocks_7_attn{n}.lora_down.weight": torch.zeros(2, 2) for n in range(10)}
    message = _refused(base, {**tensors, **extra}, tmp_path)
    assert "10 of 13 tensors match nothing" in message
    assert "lora_unet_down_blocks_7_attn0.lora_down.weight" in message
    assert "and 2 more" in message


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape)


_TWO_KINDS = f"unet.{_Q} has factors of LoRA ({_NAME}.lora_up.weight) and"
_MID = f"unet.{_Q}: the middle factor (lora_mid) has the shape"
_NOT_FINITE = "has elements that are not finite (NaN or infinity)"
_TOO_STRONG = f"unet.{_Q}: alpha / rank * up @ down may reach 1e+60, beyond the range of F32"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        # What is beside the factors.
        (
            {"hada_w1_a": _zeros(2, 2)},
            f"{_TWO_KINDS} factors of LoHa ({_NAME}.hada_w1_a): save each in a file of its own",
        ),
        (
            {"dora_scale": _zeros(2, 2)},
            f"{_SHAPED} the magnitudes of DoRA in {_NAME}.dora_scale, [2, 2], do not fit it",
        ),
        (
            {"w_norm": _zeros(2)},
            f"{_NAME}.w_norm is a difference of a normalisation layer, and unet.{_Q} is another layer",
        ),
        ({"anything": _zeros(2)}, f"1 of 4 tensors match nothing in the base model: {_NAME}.anything"),
        *(
            ({part: _zeros(2, 2)}, f"the file has {kind}, which are not supported: {_NAME}.{part}")
            for part, kind in (
                ("oft_blocks", "blocks of OFT"),
                ("a1.weight", "factors of GLoRA"),
                ("lora_diag", "diagonals of KaSA"),
                ("scalar", "scalars of LyCORIS"),
                ("set_weight", "full differences of weights"),
                ("lora_embedding_A", "factors of embeddings"),
                ("bias", "biases"),
                ("modules_to_save.weight", "whole modules"),
            )
        ),
        # Shapes.
        ({"lora_down.weight": _zeros(2, 7)}, f"{_SHAPED} down, [2, 7], and up, [96, 2], do not fit it"),
        ({"lora_up.weight": _zeros(5, 2)}, f"{_SHAPED} down, [2, 96], and up, [5, 2], do not fit it"),
        ({"lora_down.weight": torch.tensor(1.0)}, f"unet.{_Q}: down has the shape [], which has no rank"),
        (
            {"lora_down.weight": _zeros(600, 96), "lora_up.weight": _zeros(96, 600)},
            f"unet.{_Q} has rank 600; the maximum is 512",
        ),
        (
            {"lora_mid.weight": _zeros(3, 2, 1, 1)},
            f"{_MID} [3, 2, 1, 1], which does not fit that of lora_down, [2, 96]",
        ),
        (
            {"lora_mid.weight": _zeros(2, 2, 0, 1), "lora_down.weight": _zeros(2, 96, 1, 1)},
            f"{_MID} [2, 2, 0, 1], and the base model's weight [96, 96]: they do not fit",
        ),
        ({"lora_up.weight": None}, f"unet.{_Q} lacks up"),
        (
            {"lora_down.weight": None, "lora_up.weight": None, "dora_scale": _zeros(96, 1)},
            f"unet.{_Q} lacks down and up, beside its magnitudes of DoRA ({_NAME}.dora_scale)",
        ),
        (
            {"lora_A.weight": _zeros(2, 96)},
            f"{_NAME}.lora_down.weight and {_NAME}.lora_A.weight are the same part of unet.{_Q}",
        ),
        # Values.
        *(
            ({"lora_up.weight": torch.full((96, 2), value, dtype=dtype)}, f"{_NAME}.lora_up.weight {_NOT_FINITE}")
            for value, dtype in ((torch.inf, torch.float32), (torch.nan, torch.bfloat16))
        ),
        (
            {"lora_up.weight": torch.zeros(96, 2, dtype=torch.float64)},
            f"{_NAME}.lora_up.weight has elements of F64; BF16, F16, F32 are supported",
        ),
        ({"alpha": torch.tensor(torch.nan)}, f"{_NAME}.alpha is not finite"),
        ({"alpha": _zeros(3)}, f"{_NAME}.alpha is not a single number: F32[3]"),
        (
            {"alpha": torch.tensor(-1e300, dtype=torch.float64)},
            f"unet.{_Q}: its alpha over its rank is -5e+299, beyond the range of F32",
        ),
        (
            {"lora_mid.weight": torch.full((2, 2, 1, 1), 1e30), "lora_down.weight": torch.full((2, 96, 1, 1), 1e30)},
            f"unet.{_Q}: the product of lora_mid and lora_down is beyond the range of F32",
        ),
        ({f"lora_{part}.weight": torch.full(shape, -1e30) for part, shape in _SHAPES}, _TOO_STRONG),
        ({f"lora_{part}.weight": torch.full(shape, -1e30).bfloat16() for part, shape in _SHAPES}, _TOO_STRONG),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(
    base: Base, tmp_path: Path, change: dict[str, Tensor | None], says: str
) -> None:
    tensors, _ = kohya({("unet", _Q): Part(rank=2, alpha=1.0)})
    changed = tensors | {f"{_NAME}.{part}": tensor for part, tensor in change.items()}
    assert _refused(base, {name: tensor for name, tensor in changed.items() if tensor is not None}, tmp_path) == says


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_strong_and_still_a_number_is_taken(base: Base, tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {f"{_NAME}.lora_{part}.weight": torch.full(shape, -1e19).to(dtype) for part, shape in _SHAPES}
    path = save(tensors, tmp_path / "a.safetensors")  # 2 * 1e38, and the largest F32 is 3.4e38
    (module,) = convert(sources(path), base=base).modules
    assert module.scale == 1.0


_UNUSABLE = "adapter_config.json cannot be used:"
_UNLIKE = "these files are not of the same adapter"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (b"", "the file is PEFT's, whose alpha is in adapter_config.json: upload the folder that has both"),
        (b"[]", f"{_UNUSABLE} it is not a JSON object"),
        (b'{"lora_alpha": "4"}', f"{_UNUSABLE} lora_alpha: Input should be a valid number"),
        (b'{"lora_alpha": NaN}', f"{_UNUSABLE} lora_alpha: Input should be a finite number"),
        (b'{"use_rslora": "false"}', f"{_UNUSABLE} use_rslora: Input should be a valid boolean"),
        (b'{"lora_alpha": 1e300}', f"unet.{_Q}: its alpha over its rank is 5e+299, beyond the range of F32"),
        (b'{"use_dora": true}', f"adapter_config.json sets use_dora, but unet.{_Q} has no magnitudes of DoRA"),
        (
            b'{"init_lora_weights": "pissa_niter_4"}',
            (
                "adapter_config.json says init_lora_weights pissa_niter_4, which changes the base model's weights: "
                "save the LoRA with PEFT's path_initial_model_for_weight_conversion"
            ),
        ),
        *(
            (
                json.dumps({"alpha_pattern": {key: 1}}).encode(),
                f"adapter_config.json has an alpha_pattern '{key}' that matches no module of the file",
            )
            for key in ("to_k", "^attn1.to_q")
        ),
        (b'{"r": 4}', f"unet.{_Q} has rank 2, but adapter_config.json says 4: {_UNLIKE}"),
        (
            b'{"r": 2, "rank_pattern": {"attn1.to_q": 8}}',
            f"unet.{_Q} has rank 2, but adapter_config.json says 8: {_UNLIKE}",
        ),
        (b'{"bias": "all"}', "adapter_config.json says bias all: LoRAs with trained biases are not supported"),
        (b'{"use_qalora": true}', "adapter_config.json sets use_qalora: LoRAs with QALoRA are not supported"),
        (
            b'{"modules_to_save": ["conv_in"]}',
            "adapter_config.json sets modules_to_save: LoRAs with whole modules are not supported",
        ),
        (
            b'{"use_tomorrow": true}',
            "adapter_config.json sets 'use_tomorrow', which is unknown: it may change the picture",
        ),
    ],
)
def test_a_configuration_that_cannot_be_used_is_refused(base: Base, tmp_path: Path, config: bytes, says: str) -> None:
    down, up = torch.zeros(2, 96), torch.zeros(96, 2)
    tensors = {f"base_model.model.{_Q}.lora_A.weight": down, f"base_model.model.{_Q}.lora_B.weight": up}
    assert _refused(base, tensors, tmp_path, adapter_config=config) == says


_FACTORS = {"lora_A.weight": torch.zeros(2, 96), "lora_B.weight": torch.zeros(96, 2)}
_METADATA = "the file's lora_adapter_metadata"


@pytest.mark.parametrize(
    ("prefix", "fields", "says"),
    [
        ("unet.", [], f"{_METADATA} cannot be used: it is not a JSON object"),
        ("unet.", {"unet.lora_alpha": []}, f"{_METADATA} cannot be used: lora_alpha: Input should be a valid number"),
        ("unet.", {"unet.lora_alpha": 1e300}, f"unet.{_Q}: its alpha over its rank is 5e+299, beyond the range of F32"),
        *(
            (prefix, fields, f"{_METADATA} has an alpha_pattern '{key}' that matches no module of the file")
            for prefix, key, fields in (
                ("unet.", f"^unet.{_Q}", {"unet.alpha_pattern": {f"^unet.{_Q}": 1}}),
                ("", "to_k", {"alpha_pattern": {"to_k": 1}}),
            )
        ),
        (
            "unet.",
            {"unet.r": 2, "text_encoder.lora_alpha": 4},
            f"{_METADATA} configures text_encoder, but the file has no tensors for it",
        ),
        (
            "unet.",
            {"vae.lora_alpha": 4},
            f"{_METADATA} configures 'vae', which is not a component of the base model",
        ),
        (
            "unet.",
            {"unet.lora_alpha": 4, "lora_alpha": 4},
            f"{_METADATA} names a component for some fields but not for others: lora_alpha",
        ),
        (
            "unet.",
            {"lora_alpha": 4},
            f"{_METADATA} has no component names, but the file's tensor names have: unet.{_Q}.lora_A.weight",
        ),
        ("unet.", {"unet.r": 3}, f"unet.{_Q} has rank 2, but {_METADATA} says 3: {_UNLIKE}"),
    ],
)
def test_metadata_that_no_module_takes_is_refused_by_name(
    base: Base, tmp_path: Path, prefix: str, fields: Any, says: str
) -> None:
    tensors = {f"{prefix}{_Q}.{part}": tensor for part, tensor in _FACTORS.items()}
    assert _refused(base, tensors, tmp_path, metadata={"lora_adapter_metadata": json.dumps(fields)}) == says


def test_an_alpha_that_is_said_twice_is_refused(base: Base, tmp_path: Path) -> None:
    metadata = {"lora_adapter_metadata": json.dumps({"unet.lora_alpha": 4})}
    tensors, _ = kohya({("unet", _Q): Part(rank=2, alpha=4.0)})
    says = f"{_NAME}.alpha and the file's lora_adapter_metadata both state an alpha: remove one of them"
    assert _refused(base, tensors, tmp_path, metadata=metadata) == says
    bare = {f"{_Q}.{part}": tensor for part, tensor in _FACTORS.items()}
    says = "the file's metadata and adapter_config.json both state alphas: remove one of them"
    assert _refused(base, bare, tmp_path, metadata=metadata, adapter_config=b"{}") == says


@pytest.mark.parametrize(("alpha", "refused"), [("1", True), ("2.0", False), ("Dynamic", False)])
def test_kohyas_alpha_that_only_the_metadata_has_is_not_passed_over(
    base: Base, tmp_path: Path, alpha: str, refused: bool
) -> None:
    metadata = {"ss_network_alpha": alpha, "ss_network_dim": "2"}
    stated, expected = kohya({("unet", _Q): Part(rank=2, alpha=1.0)})
    assert len(convert(sources(save(stated, tmp_path / "stated.safetensors", metadata)), base=base).modules) == 1
    unstated = {name: tensor for name, tensor in stated.items() if not name.endswith(".alpha")}
    if refused:
        assert _refused(base, unstated, tmp_path, metadata=metadata) == (
            f"the file's ss_network_alpha is 1 and the rank of unet.{_Q} is 2, but no module has an .alpha: the LoRA's "
            "strength is unclear"
        )
        return
    path = save(unstated, tmp_path / "unstated.safetensors", metadata)
    _assert_same(_deltas(convert(sources(path), base=base), tmp_path), {f"unet.{_Q}": 2 * expected[f"unet.{_Q}"]})


_SGM = "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_k"


@pytest.mark.parametrize(
    ("one", "other"),
    [(f"lora_unet_{_OUT.replace('.', '_')}", _SGM), (f"unet.{_Q}", _OUT), (_Q, _SGM)],
)
def test_a_file_that_names_modules_in_two_ways_is_refused(base: Base, tmp_path: Path, one: str, other: str) -> None:
    """Of such a file stock Diffusers reads the modules of one way alone, without a word."""
    parts = [f"{name}.lora_{part}.weight" for name in (one, other) for part in ("down", "up")]
    message = _refused(base, {part: torch.zeros(2, 2) for part in parts}, tmp_path)
    assert message.startswith("the file names modules in two ways, ")
    assert message.endswith(": save it with one way of naming")
    assert one in message
    assert other in message


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (f"text_encoder.{_TEXT}.lora_A", f"text_encoder.text_model.{_TEXT}.lora_A"),
        (f"text_encoder.{_TEXT}.lora_linear_layer.down", f"text_encoder.{_TEXT.replace('q_proj', 'to_q')}_lora.down"),
        (f"unet.{_Q}.lora_A", f"unet.{_Q.replace('.to_q', '.processor.to_q')}_lora.down"),
    ],
)
def test_two_spellings_of_one_tensor_are_refused(base: Base, tmp_path: Path, one: str, other: str) -> None:
    message = _refused(base, {f"{name}.weight": torch.zeros(2, 64) for name in (one, other)}, tmp_path)
    module = f"unet.{_Q}" if one.startswith("unet") else f"text_encoder.{_TEXT}"
    assert message.endswith(f"are the same part of {module}")


def test_a_file_with_several_adapters_is_refused(base: Base, tmp_path: Path) -> None:
    tensors = {f"unet.{_Q}.lora_{part}.ink.weight": torch.zeros(2, 96) for part in "AB"}
    tensors |= {f"unet.{_K}.lora_{part}.wash.weight": torch.zeros(2, 96) for part in "AB"}
    message = _refused(base, tensors, tmp_path)
    assert message == "the file has several adapters (ink, wash): save each in a file of its own"


def test_a_file_that_could_be_for_both_text_encoders_is_refused_unless_its_shapes_tell(
    base: Base, tmp_path: Path
) -> None:
    factors = {"lora_A.weight": torch.zeros(2, 64), "lora_B.weight": torch.zeros(64, 2)}
    tensors = {f"text_model.{_TEXT}.{part}": tensor for part, tensor in factors.items()}
    path = save(tensors, tmp_path / "a.safetensors")
    with pytest.raises(BadLora, match=r"may be for text_encoder or text_encoder_2, .*put the component before"):
        convert(sources(path), base=base)
    wider = [
        BaseModule(component=component, path=_TEXT, shape=(width, width))
        for component, width in (("text_encoder", 32), ("text_encoder_2", 64))
    ]
    for more in ({}, {"lora_magnitude_vector": torch.ones(64)}):
        path = save(tensors | {f"text_model.{_TEXT}.{part}": tensor for part, tensor in more.items()}, path)
        (module,) = convert(sources(path), base=Base(wider, originals={})).modules
        assert module.component == "text_encoder_2"


def test_pickled_weights_are_never_opened(base: Base, tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1)}, tmp_path / "adapter_model.bin")
    with pytest.raises(BadLora, match="never opened"):
        convert(sources(tmp_path), base=base)
    with pytest.raises(BadLora, match="the file is not an acceptable safetensors file: it says that its header has "):
        convert(sources(tmp_path / "adapter_model.bin"), base=base)


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_link_that_took_a_files_place_after_it_was_checked_is_not_read(base: Base, tmp_path: Path, file: str) -> None:
    folder = (tmp_path / "root" / "lora").resolve()
    peft({("unet", _Q): Part(rank=2, alpha=1.0)}, folder)
    folder, root = folder / "unet", folder.parent
    assert convert(sources(folder, root=root), base=base).modules
    (folder / file).rename(tmp_path / file)
    (folder / file).symlink_to(tmp_path / file)
    with pytest.raises(OSError, match=r"must be below .*, after links are resolved"):
        convert(sources(folder, root=root), base=base)
    assert convert(sources(folder), base=base).modules  # what its operator put there may be links


def test_a_trigger_phrase_of_the_file_is_told(base: Base, tmp_path: Path) -> None:
    tensors, _ = kohya({("unet", _Q): Part(rank=2)})
    path = save(tensors, tmp_path / "a.safetensors", {"modelspec.trigger_phrase": " in ink "})
    assert convert(sources(path), base=base).trigger_phrase == "in ink"


def test_a_base_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        read_base(tmp_path)


def test_a_lora_in_part_keeps_what_matches_and_lists_the_rest(base: Base, tmp_path: Path) -> None:
    tensors, expected = kohya({("unet", _Q): Part(rank=2, alpha=1.0)})
    other = {
        f"lora_unet_elsewhere_{index}.lora_{part}.weight": torch.ones(2, 2)
        for index in (0, 1)
        for part in ("up", "down")
    }
    path = save({**tensors, **other, "what.else": torch.ones(1)}, tmp_path / "a.safetensors")
    with pytest.raises(BadLora, match="match nothing in the base model"):
        convert(sources(path), base=base)
    converted = convert(sources(path), base=base, allow_partial=True)
    assert [f"{module.component}.{module.path}" for module in converted.modules] == list(expected)
    assert set(converted.ignored) == {"lora_unet_elsewhere_0", "lora_unet_elsewhere_1", "what.else"}
    with (tmp_path / "canonical").open("w+b") as file:
        canonical.write(file, converted.modules, ignored=converted.ignored)
        file.seek(0)
        assert canonical.read(file).ignored == converted.ignored
    many = {f"elsewhere.{index}": torch.ones(1) for index in range(canonical.MAX_IGNORED + 1)}
    with pytest.raises(BadLora) as refused:
        convert(sources(save(tensors | many, path)), base=base, allow_partial=True)
    assert refused.value.message == "257 layers match nothing in the base model; at most 256 can be ignored"
    nothing = save(other, tmp_path / "b.safetensors")
    with pytest.raises(BadLora, match="nothing in the file matches the base model"):
        convert(sources(nothing), base=base, allow_partial=True)


def test_embeddings_that_a_file_brings_along_are_refused_by_name(base: Base, tmp_path: Path) -> None:
    tensors, _ = kohya({("unet", _Q): Part(rank=2, alpha=1.0)})
    message = _refused(base, {**tensors, "bundle_emb.<ink>.clip_l": torch.zeros(2, 64)}, tmp_path)
    assert message == (
        "the file bundles embeddings of the tokens <ink> with a LoRA: save each in a file of its own, its tensors "
        "without the start bundle_emb.TOKEN., and add the LoRA without them"
    )
