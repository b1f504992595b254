"""Files that cannot be converted are refused within 2 s, each with its sentence, and leave nothing on the disk."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import bottega.worker.conversion.tensors  # noqa: F401 - no refusal shall be charged for the import of torch
from bottega.client.checkup.models import read_model_facts
from bottega.errors import ConfigError
from bottega.model_files.single_file import OTHER_VERSION
from bottega.worker.conversion import folder
from bottega.worker.conversion.folder import convert_file
from tests.samples.single_files import SHAPES, write_single_file, write_vae_file
from tests.support.processor_speed import on_this_machine

LIMIT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hostile:
    """A file that cannot be converted."""

    write: Callable[[Path], object]
    sentence: str
    family: str = ""


def _header(path: Path, header: object, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _entry(begin: int, end: int, shape: list[int], dtype: str = "F16") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def _changed(path: Path, family: str = "sd15", **tensors: torch.Tensor | None) -> None:
    write_single_file(path, family)
    state = load_file(path)
    for name, tensor in tensors.items():
        ending = name.replace("__", ".")
        found = next((key for key in state if key.endswith(ending)), f"{_UNET}{ending}")
        if tensor is None:
            del state[found]
        else:
            state[found] = tensor
    save_file(state, path)


def _five_hundred_blocks(path: Path) -> None:
    names = [f"model__diffusion_model__input_blocks__{number}__0__weight" for number in range(500)]
    write_single_file(path, "sd15")
    save_file(load_file(path) | {name.replace("__", "."): torch.zeros(1) for name in names}, path)


def _deep_vae(path: Path) -> None:
    _zeros(
        path, *(f"encoder.down.0.block.{number}.conv1.weight" for number in range(16_000)), "decoder.up.0.a", shape=(1,)
    )


def _many_output_blocks(path: Path) -> None:
    names = [f"{_UNET}output_blocks.{number}.0.weight" for number in range(5000)]
    write_single_file(path, "sd15")
    save_file(load_file(path) | {name: torch.zeros(1) for name in names}, path)


def _with_nan(path: Path) -> None:
    write_vae_file(path)
    state = load_file(path)
    state["decoder.conv_in.weight"][0, 0, 0, 0] = torch.nan
    save_file(state, path)


def _without(path: Path, *parts: str, **shape: Any) -> None:
    """Write a model without the tensors whose names have one of these parts."""
    write_single_file(path, "sd15", shape=replace(SHAPES["sd15"], **shape))
    save_file({name: tensor for name, tensor in load_file(path).items() if not any(map(name.count, parts))}, path)


def _with_metadata(path: Path, **metadata: str) -> None:
    write_single_file(path, "sd15")
    save_file(load_file(path), path, {name.replace("__", "."): value for name, value in metadata.items()})


def _grey_vae(path: Path) -> None:
    write_vae_file(path)
    save_file(load_file(path) | {"decoder.conv_out.weight": torch.zeros(1, 32, 3, 3)}, path)


def _zeros(path: Path, *names: str, shape: tuple[int, ...] = (4, 4), dtype: torch.dtype = torch.float16) -> None:
    save_file({name: torch.zeros(shape, dtype=dtype) for name in names}, path)


_UNET = "model.diffusion_model."
_FIRST = f"{_UNET}input_blocks.0.0.weight"
_DOUBLE = "double_blocks.0.img_attn.qkv.weight"
_VAE = "first_stage_model.decoder.a.weight"
_CLIP = "cond_stage_model.transformer.a.weight"
_DEEP = b'{"a":' + b"[" * 1000 + b"]" * 1000 + b"}"

HOSTILE: Mapping[str, Hostile] = {
    "cut off": Hostile(
        write=lambda path: _header(path, {"a": _entry(0, 8, [4])}, bytes(4)),
        sentence="it is damaged or cut off (its tensors take 8 bytes, and 4 are behind its header); "
        "download the file again",
    ),
    "a header longer than the file": Hostile(
        write=lambda path: path.write_bytes(struct.pack("<Q", 1 << 20) + b"{}"),
        sentence="it is damaged or cut off (its header of 1048584 bytes is longer than the file, which has 10); "
        "download the file again",
    ),
    "a header of a terabyte": Hostile(
        write=lambda path: path.write_bytes(struct.pack("<Q", 1 << 40) + b"{}"),
        sentence="it is damaged or cut off (it says that its header has 1099511627776 bytes; 2 to 8388608 are "
        "accepted); download the file again",
    ),
    "weights nested 1,000 deep": Hostile(
        write=lambda path: _header(path, _DEEP),
        sentence="it is damaged or cut off (its header is no JSON object with unique names); download the file again",
    ),
    "tensors that overlap": Hostile(
        write=lambda path: _header(path, {"a": _entry(0, 8, [4]), "b": _entry(4, 12, [4])}, bytes(12)),
        sentence="it is damaged or cut off (tensor b overlaps a); download the file again",
    ),
    "a tensor of more elements than bytes": Hostile(
        write=lambda path: _header(path, {"a": _entry(0, 8, [1 << 40, 1 << 40])}, bytes(8)),
        sentence="it is damaged or cut off (tensor a does not have the bytes that its shape needs); "
        "download the file again",
    ),
    "a link in a circle": Hostile(
        write=lambda path: path.symlink_to(path.name), sentence="its links lead in circles; download the model again"
    ),
    "the UNet of another family": Hostile(
        write=lambda path: write_single_file(path, "sd15", shape=replace(SHAPES["sd15"], context=128)),
        sentence="its parts do not fit each other: unet/config.json: cross_attention_dim must be 64, hidden_size of "
        "text_encoder, not 128",
    ),
    "another family than the operator's": Hostile(
        write=lambda path: write_single_file(path, "sd15"),
        sentence="its tensors are those of Stable Diffusion 1 (sd15), not of SDXL (sdxl)",
        family="sdxl",
    ),
    "a VAE of an unknown family": Hostile(
        write=write_vae_file,
        sentence="VAEs of several families have the same tensors; say for which it is: --family "
        "sd15|sd21|sdxl|sd3|flux",
    ),
    "a missing tensor": Hostile(
        write=lambda path: _changed(path, middle_block__2__out_layers__3__bias=None),
        sentence="its unet is not that of a Stable Diffusion 1 model: it lacks middle_block.2.out_layers.3.bias; "
        f"{OTHER_VERSION}",
    ),
    "a tensor of another shape": Hostile(
        write=lambda path: _changed(path, out__2__bias=torch.zeros(5)),
        sentence="its unet is not that of a Stable Diffusion 1 model: out.2.bias has the shape [5] instead of "
        f"[4]; {OTHER_VERSION}",
    ),
    "five hundred blocks": Hostile(
        write=_five_hundred_blocks, sentence="its UNet has 500 input blocks, and those of known models have 9 or 12"
    ),
    "a VAE of 16,000 layers": Hostile(
        write=_deep_vae,
        sentence="it has over 64 layers such as encoder.down.0.block.0.conv1.weight, more than any known model",
        family="sdxl",
    ),
    "5,000 output blocks": Hostile(
        write=_many_output_blocks,
        sentence=f"its unet is not that of a Stable Diffusion 1 model: it has too many modules; {OTHER_VERSION}",
    ),
    "a UNet that reads the guidance scale": Hostile(
        write=lambda path: _changed(path, time_embed__cond_proj__weight=torch.zeros(128, 256)),
        sentence="its unet is not that of a Stable Diffusion 1 model: nothing takes "
        f"time_embed.cond_proj.weight; {OTHER_VERSION}",
    ),
    "unCLIP": Hostile(
        write=lambda path: _zeros(path, _FIRST, f"{_UNET}label_emb.0.0.weight", "cond_stage_model.model.a.weight"),
        sentence="it is an unCLIP model, which draws from pictures; give the file of a model that draws from words",
    ),
    "NaN in a VAE": Hostile(
        write=_with_nan,
        sentence="the tensor decoder.conv_in.weight of its vae has values that are no finite numbers; download the "
        "file again, or another version of the model",
        family="sdxl",
    ),
    "quantized weights": Hostile(
        write=lambda path: _zeros(path, _FIRST, _VAE, _CLIP, dtype=torch.int8),
        sentence=f"the tensor {_CLIP} has elements of I8; quantized weights are not served, download float32, float16 "
        "or bfloat16 ones",
    ),
    "a LoRA": Hostile(
        write=lambda path: _zeros(path, "lora_unet_a.lora_up.weight"),
        sentence="it is a LoRA; add it with `bottega loras add NAME FILE`",
    ),
    "SDXL's refiner": Hostile(
        write=lambda path: _zeros(path, _FIRST, "conditioner.embedders.0.model.a.weight", _VAE),
        sentence="it is SDXL's refiner, which has no first text encoder and takes an aesthetic score; give the file "
        "of an SDXL base model",
    ),
    "Chroma, whose blocks are those of Flux.1": Hostile(
        write=lambda path: _zeros(path, _DOUBLE, "distilled_guidance_layer.in_proj.weight"),
        sentence="it is a Chroma model; only Stable Diffusion 1, Stable Diffusion 2, SDXL, Stable Diffusion 3 and "
        "Flux.1 can be converted",
    ),
    "Flux.1 in float8": Hostile(
        write=lambda path: _zeros(path, f"{_UNET}{_DOUBLE}", dtype=torch.float8_e4m3fn),
        sentence=f"the tensor {_UNET}{_DOUBLE} has elements of F8_E4M3; quantized weights are not served, download "
        "float32, float16 or bfloat16 ones",
    ),
    "a transformer without text encoders": Hostile(
        write=lambda path: _zeros(path, f"{_UNET}joint_blocks.0.x_block.attn.qkv.weight", _VAE),
        sentence="it lacks text_encoder, text_encoder_2, tokenizer, tokenizer_2; name the folder of a Stable Diffusion "
        "3 model that has them with --parts of `bottega up` or `bottega models import`",
    ),
    "a UNet alone": Hostile(
        write=lambda path: _zeros(path, "input_blocks.0.0.weight"),
        sentence="it has a denoising network alone, without text encoders and VAE; give the file of a whole model",
    ),
    "a transformer that lacks a projection": Hostile(
        write=lambda path: _changed(path, "sd3", joint_blocks__1__x_block__mlp__fc1__bias=None),
        sentence="its transformer is not that of a Stable Diffusion 3 model: it lacks "
        f"joint_blocks.1.x_block.mlp.fc1.bias; {OTHER_VERSION}",
    ),
    "a transformer with a fused projection of another shape": Hostile(
        write=lambda path: _changed(path, "sd3", joint_blocks__1__x_block__attn__qkv__bias=torch.zeros(96)),
        sentence="its transformer is not that of a Stable Diffusion 3 model: joint_blocks.1.x_block.attn.qkv.bias has "
        f"the shape [96] instead of [192]; {OTHER_VERSION}",
    ),
    "a transformer of a billion blocks": Hostile(
        write=lambda path: _changed(path, "sd3", joint_blocks__1000000000__a=torch.zeros(1)),
        sentence="its transformer is not that of a Stable Diffusion 3 model: nothing takes joint_blocks.1000000000.a; "
        f"{OTHER_VERSION}",
    ),
    "a transformer with a tensor that nothing takes": Hostile(
        write=lambda path: _changed(path, "sd3", joint_blocks__1__x_block__more__weight=torch.zeros(1)),
        sentence="its transformer is not that of a Stable Diffusion 3 model: nothing takes "
        f"joint_blocks.1.x_block.more.weight; {OTHER_VERSION}",
    ),
    "positions of no square": Hostile(
        write=lambda path: _changed(path, "sd3", pos_embed=torch.zeros(1, 64 * 65, 64)),
        sentence="its transformer is not that of a Stable Diffusion 3 model: pos_embed has the shape "
        f"[1, 4160, 64] instead of [1, 4096, 64]; {OTHER_VERSION}",
    ),
    "a transformer whose patches have no shape": Hostile(
        write=lambda path: _changed(path, "sd3", x_embedder__proj__weight=torch.zeros(4)),
        sentence="its transformer is not that of a Stable Diffusion 3 model: a tensor has too few dimensions; "
        f"{OTHER_VERSION}",
    ),
    "no text encoder": Hostile(
        write=lambda path: _zeros(path, _FIRST, f"{_UNET}label_emb.0.0.weight", _VAE),
        sentence="it lacks text_encoder, text_encoder_2, tokenizer, tokenizer_2; name the folder of an SDXL model that "
        "has them with --parts of `bottega up` or `bottega models import`",
    ),
    "a part in Diffusers' layout": Hostile(
        write=lambda path: _zeros(path, "down_blocks.0.resnets.0.conv1.weight"),
        sentence="it is one part of a model in Diffusers' layout; give the folder that has model_index.json and all "
        "parts",
    ),
    "a union of ControlNets without the rest": Hostile(
        write=lambda path: _zeros(
            path, "controlnet_cond_embedding.conv_in.weight", "add_embedding.linear_1.weight", "task_embedding"
        ),
        sentence="its controlnet is not that of an SDXL model: it lacks controlnet_cond_embedding.conv_out.weight; "
        f"{OTHER_VERSION}",
    ),
    "the weights of something else": Hostile(
        write=lambda path: _zeros(path, "backbone.layer.weight"),
        sentence="its tensors, such as backbone.layer.weight, are those of no model that is known; give the file of a "
        "whole model, a VAE or a ControlNet, or a folder with model_index.json",
    ),
    "a ControlNet without transformers": Hostile(
        write=lambda path: _zeros(path, "control_model.input_blocks.0.0.weight"),
        sentence="its network has no transformers, by which its family is known; download its folder instead",
    ),
    "metadata of another prediction": Hostile(
        write=lambda path: _with_metadata(path, modelspec__prediction_type="flow"),
        sentence="its metadata says that it predicts flow; give --prediction-type, if you know better",
    ),
    "layers that differ": Hostile(
        write=lambda path: _without(path, "input_blocks.2.1.", layers=2),
        sentence="the layers of a level of its UNet differ, as in SSD-1B; download its folder instead",
    ),
    "no transformer in the middle": Hostile(
        write=lambda path: _without(path, "middle_block.1."),
        sentence="its UNet has no transformer in the middle; download its folder instead",
    ),
    "a tensor of too few dimensions": Hostile(
        write=lambda path: _changed(path, input_blocks__0__0__weight=torch.zeros(3)),
        sentence="its unet is not that of a Stable Diffusion 1 model: a tensor has too few dimensions; "
        f"{OTHER_VERSION}",
    ),
    "a VAE of grey pictures": Hostile(
        write=_grey_vae,
        sentence="its vae cannot be served: out_channels must be 3, not 1: pictures are RGB",
        family="sdxl",
    ),
    "no VAE": Hostile(
        write=lambda path: _without(path, "first_stage_model."),
        sentence="it has no VAE; give the file of one with --vae, in a worker's configuration as engine.vae.folder",
    ),
    "no tensors": Hostile(write=lambda path: _header(path, {}), sentence="it has no tensors; download the file again"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_import_and_a_check_refuse_it_at_once_and_leave_nothing(name: str, tmp_path: Path) -> None:
    hostile, file = HOSTILE[name], tmp_path / "model.safetensors"
    hostile.write(file)
    began_s = time.process_time()
    with pytest.raises(ConfigError) as refused:
        convert_file(file, tmp_path / "model", hostile.family)
    assert time.process_time() - began_s < on_this_machine(LIMIT_S)
    assert refused.value.message == f"{file} cannot be converted: {hostile.sentence}"
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    # A choice of a family may be wrong or missing only at an import, and a check reads no weights.
    if not hostile.family and hostile.write is not write_vae_file:
        began_s = time.process_time()
        assert len(read_model_facts(str(file)).problems) == 1
        assert time.process_time() - began_s < on_this_machine(LIMIT_S)


def test_a_part_that_does_not_fit_into_memory_is_named_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of zeros takes no room on the disk, and the kernel ends a process that uses too much memory."""
    file = write_single_file(tmp_path / "model.safetensors", "sd15")
    monkeypatch.setattr(folder, "available_bytes", lambda: 1 << 20)
    with pytest.raises(ConfigError, match=r"its text_encoder has \d+ MiB, which are in memory at once, and 1 MiB are"):
        convert_file(file, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_other_files_are_never_opened(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "model.ckpt")
    with pytest.raises(ConfigError) as refused:
        convert_file(tmp_path / "model.ckpt", tmp_path / "model")
    assert refused.value.message == (
        f"{tmp_path / 'model.ckpt'} cannot be converted: it is no .safetensors file, and other weights are never "
        "opened because they may run code"
    )
