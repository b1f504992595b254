"""Folders and files that are no model that can be served, each with the sentence that says so.

Most are copies of the embedded model with one thing wrong; without torch.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bottega.miniature import WEIGHTS
from bottega.safetensors_header import ITEM_BYTES, TensorEntry, read_header

UNET = "unet/diffusion_pytorch_model.safetensors"
VAE = "vae/diffusion_pytorch_model.safetensors"
_PARTS = ("scheduler", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "unet", "vae")
_LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 5135149760\n"
_SHARDS = ("diffusion_pytorch_model-00001-of-00002.safetensors", "diffusion_pytorch_model-00002-of-00002.safetensors")

_GIVE = "give the folder of a model in Diffusers' layout"
_ONLY = f"only Stable Diffusion 1, Stable Diffusion 2, SDXL, Stable Diffusion 3, Flux.1 and Z-Image are served; {_GIVE}"
_AGAIN = "download the file again"


@dataclass(frozen=True, slots=True)
class WrongFolder:
    """Something that somebody may give for a model."""

    name: str
    """What it is, for the test's name."""
    make: Callable[[Path], Path | None]
    """Makes it at a path; returns what is given for a model where that is another path."""
    sentence: str
    """Why it cannot be served. `{given}` stands for the path that was given."""

    def make_at(self, path: Path) -> tuple[Path, str]:
        """Make it, and return what is given for a model, and the sentence about it."""
        given = self.make(path) or path
        return given, self.sentence.replace("{given}", str(given))


def link_model(folder: Path) -> None:
    """Make a model of links to the files of the embedded one, as a hub's snapshot is."""
    for part in _PARTS:
        (folder / part).mkdir(parents=True)
        for file in (WEIGHTS / part).iterdir():
            (folder / part / file.name).symlink_to(file)
    (folder / "model_index.json").symlink_to(WEIGHTS / "model_index.json")


def replace(path: Path, content: bytes | str) -> None:
    """Put a file in the place of a link, or of nothing."""
    path.unlink(missing_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def change_json(path: Path, **changes: object) -> None:
    """Change fields of a JSON object in a file."""
    replace(path, json.dumps(json.loads(path.read_bytes()) | changes))


def write_zeros(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Write a safetensors file of zeros, which takes no room on most file systems. tensors: types and shapes by "
    "name."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin = end
        size = ITEM_BYTES[dtype]
        for extent in shape:
            size *= extent
        end = begin + size
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def tensors_of(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return types and shapes of the tensors of a file by name."""
    with path.open("rb") as file:
        return {tensor.name: _described(tensor) for tensor in read_header(file).tensors}


def split_unet(folder: Path) -> dict[str, str]:
    """Put two shards and an index, which is returned, in the place of the UNet's file."""
    tensors = tensors_of(folder / UNET)
    names = list(tensors)
    (folder / UNET).unlink()
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(_SHARDS):
        held = names[number::2]
        write_zeros(folder / "unet" / shard, {name: tensors[name] for name in held})
        weight_map |= dict.fromkeys(held, shard)
    _write_index(folder, weight_map)
    return weight_map


def write_vocabulary(folder: Path) -> None:
    """Put vocab.json and merges.txt in the place of a tokenizer.json, as published folders have them."""
    model = json.loads((folder / "tokenizer.json").read_bytes())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "".join(f"{' '.join(pair)}\n" for pair in model["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}")


def _described(tensor: TensorEntry) -> tuple[str, tuple[int, ...]]:
    return tensor.dtype, tensor.shape


def _write_index(folder: Path, weight_map: Mapping[str, object]) -> None:
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "unet" / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))


def _spoiled(spoil: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return what makes a model and then spoils it."""

    def make(path: Path) -> None:
        link_model(path)
        spoil(path)

    return make


def _of_class(class_name: object, **unet: object) -> Callable[[Path], None]:
    """Return what makes a model of another pipeline, and of another UNet."""

    def spoil(path: Path) -> None:
        change_json(path / "model_index.json", _class_name=class_name)
        change_json(path / "unet" / "config.json", **unet)

    return _spoiled(spoil)


def _with_unet(**changes: object) -> Callable[[Path], None]:
    return _spoiled(lambda path: change_json(path / "unet" / "config.json", **changes))


def _with_index(**changes: object) -> Callable[[Path], None]:
    return _spoiled(lambda path: change_json(path / "model_index.json", **changes))


def _rename_part(path: Path, variant: str) -> None:
    """Leave a part with weights of a variant alone."""
    path.rename(path.with_suffix(f".{variant}.safetensors"))


def _change_tensors(path: Path, change: Callable[[dict[str, tuple[str, tuple[int, ...]]]], object]) -> None:
    tensors = tensors_of(path)
    change(tensors)
    write_zeros(path, tensors)


def _lose_a_shard(path: Path) -> None:
    split_unet(path)
    (path / "unet" / _SHARDS[1]).unlink()


def _lose_the_index(path: Path) -> None:
    split_unet(path)
    (path / "unet" / "diffusion_pytorch_model.safetensors.index.json").unlink()


def _lead_out(path: Path) -> None:
    weight_map = split_unet(path)
    _write_index(path, weight_map | {"conv_in.weight": "../vae/diffusion_pytorch_model.safetensors"})


def _name_the_index_itself(path: Path) -> None:
    weight_map = split_unet(path)
    _write_index(path, weight_map | {"conv_in.weight": "diffusion_pytorch_model.safetensors.index.json"})


def _misplace_a_tensor(path: Path) -> None:
    weight_map = split_unet(path)
    _write_index(path, weight_map | {"conv_in.weight": _other_shard(weight_map["conv_in.weight"])})


def _other_shard(name: str) -> str:
    return _SHARDS[1 - _SHARDS.index(name)]


def _mixed_variants(path: Path) -> None:
    _rename_part(path / UNET, "fp16")
    _rename_part(path / VAE, "bf16")


def _no_vocabulary(path: Path) -> None:
    write_vocabulary(path / "tokenizer_2")
    (path / "tokenizer_2" / "vocab.json").write_text("{}")


def _empty_merges(path: Path) -> None:
    write_vocabulary(path / "tokenizer")
    (path / "tokenizer" / "merges.txt").write_text("#version: 0.2\n")


def _other_vocabulary(path: Path) -> None:
    write_vocabulary(path / "tokenizer")
    vocab = json.loads((path / "tokenizer" / "vocab.json").read_bytes())
    (path / "tokenizer" / "vocab.json").write_text(json.dumps(vocab | {"more": 49407}))


def _change_vocabulary(path: Path, change: Callable[[dict[str, int]], object]) -> None:
    write_vocabulary(path / "tokenizer")
    vocab = json.loads((path / "tokenizer" / "vocab.json").read_bytes())
    change(vocab)
    (path / "tokenizer" / "vocab.json").write_text(json.dumps(vocab))


def _write_merges(path: Path, content: bytes) -> None:
    write_vocabulary(path / "tokenizer")
    (path / "tokenizer" / "merges.txt").write_bytes(content)


def _links_in_circles(path: Path) -> None:
    (path / UNET).unlink()
    (path / UNET).symlink_to(path / UNET)


def _link_to_nothing(path: Path) -> None:
    (path / UNET).unlink()
    (path / UNET).symlink_to(path / "blobs" / "absent")


def _pipe(path: Path) -> None:
    (path / "vae" / "config.json").unlink()
    os.mkfifo(path / "vae" / "config.json")


def _controlnet(path: Path) -> Path:
    return WEIGHTS / "controlnets" / "edges"


def _lora(path: Path) -> Path:
    return WEIGHTS / "loras" / "striped"


def _single_file(path: Path) -> Path:
    file = path.with_suffix(".safetensors")
    write_zeros(file, {"model.diffusion_model.input_blocks.0.0.weight": ("F16", (4, 4, 3, 3))})
    return file


def _folder_of_a_single_file(path: Path) -> None:
    path.mkdir()
    names = ("model.diffusion_model.input_blocks.0.0.weight", "model.diffusion_model.label_emb.0.0.weight")
    texts = ("conditioner.embedders.0.transformer.a.weight", "conditioner.embedders.1.model.b.weight")
    tensors = dict.fromkeys((*names, *texts, "first_stage_model.decoder.c.weight"), ("F16", (4, 4)))
    write_zeros(path / "sd_xl_base_1.0.safetensors", tensors)


def _lora_file(path: Path) -> Path:
    return WEIGHTS / "loras" / "striped" / "pytorch_lora_weights.safetensors"


def _hub_repository(path: Path) -> Path:
    repository = path / "models--stabilityai--stable-diffusion-xl-base-1.0"
    link_model(repository / "snapshots" / "462165984030d82259a11f4367a4eed129e94a7b")
    (repository / "refs").mkdir()
    return repository


WRONG_FOLDERS: tuple[WrongFolder, ...] = (
    # Other models.
    WrongFolder(
        "an upscaler of Stable Diffusion",
        _of_class("StableDiffusionUpscalePipeline", use_linear_projection=False),
        "model_index.json: _class_name is StableDiffusionUpscalePipeline, and only StableDiffusionPipeline, "
        "StableDiffusionImg2ImgPipeline, StableDiffusionInpaintPipeline, LatentConsistencyModelPipeline are "
        "served: other pipelines draw other pictures; give the folder of a Stable Diffusion 1 base model",
    ),
    WrongFolder(
        "Stable Cascade",
        _of_class("StableCascadePipeline"),
        f"model_index.json: _class_name is StableCascadePipeline: this is a Stable Cascade model, and {_ONLY}",
    ),
    WrongFolder(
        "an unknown pipeline",
        _of_class("NewPipeline"),
        f"model_index.json: _class_name is NewPipeline: this is a model of a kind that is not known, and {_ONLY}",
    ),
    WrongFolder(
        "a pipeline of its own code",
        _of_class(["pipeline", "OwnPipeline"]),
        "model_index.json: _class_name names a pipeline of its own code, which is never run; give the folder "
        "of a model with a pipeline of Diffusers",
    ),
    WrongFolder(
        "SDXL's refiner",
        _with_index(
            _class_name="StableDiffusionXLImg2ImgPipeline", requires_aesthetics_score=True, text_encoder=[None, None]
        ),
        "model_index.json: this is SDXL's refiner, which has no first text encoder and takes an aesthetic "
        "score; give the folder of an SDXL base model",
    ),
    WrongFolder(
        "a UNet that takes another picture",
        _of_class("StableDiffusionXLInpaintPipeline", in_channels=8),
        "unet/config.json: in_channels must be 4, as out_channels is, or 9 for inpainting, with a mask and a "
        "masked image beside the latent, not 8",
    ),
    WrongFolder(
        "a pipeline without a class",
        _with_index(_class_name=None),
        "model_index.json: _class_name is missing, so that the kind of model is not known; download the file again",
    ),
    WrongFolder(
        "tokens of no number",
        _spoiled(lambda path: _change_vocabulary(path, lambda vocab: vocab.update({"more": -1}))),
        f"tokenizer/vocab.json: the numbers of its tokens are no whole numbers from 0; {_AGAIN}",
    ),
    WrongFolder(
        "a vocabulary without its end",
        _spoiled(lambda path: _change_vocabulary(path, lambda vocab: vocab.pop("<|endoftext|>"))),
        "tokenizer/vocab.json: the vocabulary lacks <|endoftext|>, the eos_token of "
        "tokenizer/tokenizer_config.json; download the tokenizer again",
    ),
    WrongFolder(
        "merges of unknown tokens",
        _spoiled(lambda path: _write_merges(path, b"#version: 0.2\nq7 q8\n")),
        "tokenizer/vocab.json: the merge q7 q8 is of tokens that the vocabulary lacks; download the tokenizer again",
    ),
    WrongFolder(
        "merges that are no text",
        _spoiled(lambda path: _write_merges(path, b"\xff\xfe")),
        f"tokenizer/merges.txt: it is no UTF-8 text; {_AGAIN}",
    ),
    WrongFolder(
        "a tokenizer of another kind",
        _spoiled(lambda path: replace(path / "tokenizer" / "tokenizer.json", '{"model": {"type": "Unigram"}}')),
        "tokenizer/tokenizer.json: it is no BPE tokenizer with model and added_tokens; download the tokenizer again",
    ),
    # No model's folder.
    WrongFolder(
        "a link to no folder",
        lambda path: path.symlink_to(path.with_name("gone")),
        "it is a link to a folder that is not there; download the model again",
    ),
    WrongFolder(
        "no folder",
        lambda path: None,
        f"there is no such folder; {_GIVE} (nothing is downloaded from a hub: `hf download REPOSITORY "
        "--local-dir FOLDER` does that)",
    ),
    WrongFolder(
        "an empty folder",
        lambda path: path.mkdir(),
        f"it has no model_index.json; {_GIVE}",
    ),
    WrongFolder(
        "a single file",
        _single_file,
        "it is a single file, and its network has no transformers, by which its family is known; download its folder "
        "instead",
    ),
    WrongFolder(
        "a folder of a single file",
        _folder_of_a_single_file,
        "it has no model_index.json, but sd_xl_base_1.0.safetensors: it is a single file, a whole model; "
        "`bottega models import {given}/sd_xl_base_1.0.safetensors` converts it to a folder",
    ),
    WrongFolder(
        "another file",
        lambda path: WEIGHTS / "README.md",
        f"it is a single file; {_GIVE}, or a .safetensors file for `bottega models import`",
    ),
    WrongFolder(
        "a ControlNet",
        _controlnet,
        "it is a ControlNet; give the folder of a model, and put the ControlNet into that folder's "
        "controlnets/ or name it in the ControlNet server's configuration",
    ),
    WrongFolder(
        "a LoRA",
        _lora,
        "it is a LoRA; give the folder of a model, and add the LoRA with `bottega loras add`",
    ),
    WrongFolder(
        "a LoRA's file",
        _lora_file,
        "it is a LoRA; give the folder of a model, and add the LoRA with `bottega loras add`",
    ),
    WrongFolder(
        "a part",
        lambda path: WEIGHTS / "unet",
        "it is one part of a model (UNet2DConditionModel); give the folder that has model_index.json and all parts",
    ),
    WrongFolder(
        "a repository in the hub's cache",
        _hub_repository,
        "it is a repository in the hub's cache; give its snapshot: "
        "{given}/snapshots/462165984030d82259a11f4367a4eed129e94a7b",
    ),
    # Files that are missing or damaged.
    WrongFolder(
        "pickled weights",
        _spoiled(lambda path: (path / UNET).rename(path / "unet" / "diffusion_pytorch_model.bin")),
        "unet has only pickled weights (diffusion_pytorch_model.bin), which are never opened because they "
        "may run code; download unet/diffusion_pytorch_model.safetensors, or save the model again with "
        "safe_serialization=True",
    ),
    WrongFolder(
        "weights of another name",
        _spoiled(lambda path: (path / UNET).rename(path / "unet" / "model.safetensors")),
        "unet has model.safetensors and no diffusion_pytorch_model.safetensors; download the part again, or "
        "rename the file",
    ),
    WrongFolder(
        "no weights",
        _spoiled(lambda path: (path / UNET).unlink()),
        "unet has no diffusion_pytorch_model.safetensors; download the model again, with all of its files",
    ),
    WrongFolder(
        "no folder of a part",
        _spoiled(lambda path: (path / "vae").rename(path / "vae_of_old")),
        "the folder vae is missing; download the model again, with all parts",
    ),
    WrongFolder(
        "no configuration of a part",
        _spoiled(lambda path: (path / "unet" / "config.json").unlink()),
        "unet/config.json: there is no such file; download the model again, with all of its files",
    ),
    WrongFolder(
        "no shard",
        _spoiled(_lose_a_shard),
        "unet/diffusion_pytorch_model-00002-of-00002.safetensors (named by "
        "diffusion_pytorch_model.safetensors.index.json): there is no such file; download the model again, "
        "with all of its files",
    ),
    WrongFolder(
        "shards without an index",
        _spoiled(_lose_the_index),
        "unet has shards and no diffusion_pytorch_model.safetensors.index.json that names them; download the "
        "part again",
    ),
    WrongFolder(
        "an index that leads out of the folder",
        _spoiled(_lead_out),
        "unet/diffusion_pytorch_model.safetensors.index.json: it names "
        "../vae/diffusion_pytorch_model.safetensors, which leads out of its folder; shards lie beside their "
        "index",
    ),
    WrongFolder(
        "an index that names itself",
        _spoiled(_name_the_index_itself),
        "unet/diffusion_pytorch_model.safetensors.index.json: it names "
        f"diffusion_pytorch_model.safetensors.index.json, no safetensors file; {_AGAIN}",
    ),
    WrongFolder(
        "an index of other files",
        _spoiled(_misplace_a_tensor),
        "unet/diffusion_pytorch_model.safetensors.index.json: it names "
        "diffusion_pytorch_model-00001-of-00002.safetensors for the tensor conv_in.weight, which is in "
        "diffusion_pytorch_model-00002-of-00002.safetensors; download the part unet again",
    ),
    WrongFolder(
        "no tensor",
        _spoiled(lambda path: _change_tensors(path / UNET, lambda tensors: tensors.pop("conv_out.bias"))),
        "unet/diffusion_pytorch_model.safetensors: 1 of 308 tensors are missing, such as conv_out.bias; "
        "download the file again, or the config.json that belongs to it",
    ),
    WrongFolder(
        "no tensor of a text encoder",
        _spoiled(
            lambda path: _change_tensors(
                path / "text_encoder_2/model.safetensors", lambda tensors: tensors.pop("text_projection.weight")
            )
        ),
        "text_encoder_2/model.safetensors: 1 of 53 tensors are missing, such as text_projection.weight; "
        "download the file again, or the config.json that belongs to it",
    ),
    WrongFolder(
        "a tensor of another shape",
        _spoiled(
            lambda path: _change_tensors(path / UNET, lambda tensors: tensors.update({"conv_in.bias": ("F16", (47,))}))
        ),
        "unet/diffusion_pytorch_model.safetensors: the tensor conv_in.bias has the shape [47] and "
        "config.json asks for [48]; download both files from one model",
    ),
    WrongFolder(
        "more tensors",
        _with_unet(transformer_layers_per_block=[1, 0]),
        "unet/diffusion_pytorch_model.safetensors: 120 tensors have no place in the network that config.json "
        "describes, such as down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_k.weight; download both "
        "files from one model",
    ),
    WrongFolder(
        "quantized weights",
        _spoiled(
            lambda path: _change_tensors(path / UNET, lambda tensors: tensors.update({"conv_in.bias": ("I8", (48,))}))
        ),
        "unet/diffusion_pytorch_model.safetensors: the tensor conv_in.bias has elements of I8; quantized "
        "weights are not served, download float32, float16 or bfloat16 ones",
    ),
    WrongFolder(
        "a file that is cut off",
        _spoiled(lambda path: replace(path / UNET, (path / UNET).read_bytes()[:-1000])),
        "unet/diffusion_pytorch_model.safetensors: it is damaged or cut off (its tensors take 6717896 bytes, "
        f"and 6716896 are behind its header); {_AGAIN}",
    ),
    WrongFolder(
        "a header that lies",
        _spoiled(lambda path: replace(path / VAE, struct.pack("<Q", 1 << 40) + (path / VAE).read_bytes()[8:])),
        "vae/diffusion_pytorch_model.safetensors: it is damaged or cut off (it says that its header has "
        f"1099511627776 bytes; 2 to 8388608 are accepted); {_AGAIN}",
    ),
    WrongFolder(
        "a pointer of Git LFS",
        _spoiled(lambda path: replace(path / UNET, _LFS_POINTER)),
        "unet/diffusion_pytorch_model.safetensors: it is a Git LFS pointer in place of the file; run `git "
        "lfs pull` in the model's folder",
    ),
    WrongFolder(
        "an empty file",
        _spoiled(lambda path: replace(path / UNET, b"")),
        "unet/diffusion_pytorch_model.safetensors: it is damaged or cut off (it is shorter than the length "
        f"of a header); {_AGAIN}",
    ),
    WrongFolder(
        "links in circles",
        _spoiled(_links_in_circles),
        "unet/diffusion_pytorch_model.safetensors: its links lead in circles; download the model again",
    ),
    WrongFolder(
        "a link to nothing",
        _spoiled(_link_to_nothing),
        "unet/diffusion_pytorch_model.safetensors: it is a link to a file that is not there; download the model again",
    ),
    # Variants.
    WrongFolder(
        "parts of different variants",
        _spoiled(_mixed_variants),
        "no variant fits all parts (unet of fp16; vae of bf16); download all parts in one variant, or all without one",
    ),
    # Tokenizers.
    WrongFolder(
        "no vocabulary",
        _spoiled(lambda path: (path / "tokenizer" / "tokenizer.json").unlink()),
        "tokenizer/vocab.json: there is no such file; download the model again, with all of its files",
    ),
    WrongFolder(
        "an empty vocabulary",
        _spoiled(_no_vocabulary),
        f"tokenizer_2/vocab.json: its vocabulary is empty; {_AGAIN}",
    ),
    WrongFolder(
        "empty merges",
        _spoiled(_empty_merges),
        f"tokenizer/merges.txt: it has no merges; {_AGAIN}",
    ),
    WrongFolder(
        "another vocabulary",
        _spoiled(_other_vocabulary),
        "tokenizer/vocab.json: it has a token of number 49407 and the text encoder knows 663 tokens "
        "(vocab_size); download both from one model",
    ),
    # Configurations.
    WrongFolder(
        "broken JSON",
        _spoiled(lambda path: replace(path / "model_index.json", '{"_class_name": ')),
        f"model_index.json: it is no JSON (EOF while parsing a value at line 1 column 16); {_AGAIN}",
    ),
    WrongFolder(
        "deep JSON",
        _spoiled(lambda path: replace(path / "unet" / "config.json", '{"a":' * 1000 + "1" + "}" * 1000)),
        f"unet/config.json: it is no JSON (recursion limit exceeded at line 1 column 1006); {_AGAIN}",
    ),
    WrongFolder(
        "NaN",
        _spoiled(lambda path: replace(path / "unet" / "config.json", '{"sample_size": NaN}')),
        f"unet/config.json: it is no JSON (expected value at line 1 column 17); {_AGAIN}",
    ),
    WrongFolder(
        "a list",
        _spoiled(lambda path: replace(path / "vae" / "config.json", "[]")),
        f"vae/config.json: it is JSON, but no object; {_AGAIN}",
    ),
    WrongFolder(
        "a pipe",
        _spoiled(_pipe),
        f"vae/config.json: it cannot be read (is no regular file); {_AGAIN}",
    ),
    WrongFolder(
        "a UNet of another class",
        _with_unet(_class_name="UNet3DConditionModel"),
        'unet/config.json: _class_name must be "UNet2DConditionModel", not "UNet3DConditionModel": no other '
        "class is served",
    ),
    WrongFolder(
        "a text encoder of another kind",
        _spoiled(lambda path: change_json(path / "text_encoder" / "config.json", model_type="t5")),
        'text_encoder/config.json: model_type must be "clip_text_model", not "t5": only CLIP\'s text encoders '
        "are served",
    ),
    WrongFolder(
        "a preset with wrong values",
        _spoiled(lambda path: replace(path / "bottega.json", '{"guidance_scale": -1, "steps": 4}')),
        "bottega.json: guidance_scale: Input should be greater than or equal to 0 (got -1); steps: unknown "
        "key; known at the top level: num_inference_steps, guidance_scale, sampler, timestep_spacing, "
        "use_karras_sigmas, use_exponential_sigmas, use_beta_sigmas, final_sigmas_type, "
        "rescale_betas_zero_snr, dtype",
    ),
    WrongFolder(
        "an SDXL pipeline that draws other pictures",
        _of_class("StableDiffusionXLPAGPipeline"),
        "model_index.json: _class_name is StableDiffusionXLPAGPipeline, and only StableDiffusionXLPipeline, "
        "StableDiffusionXLImg2ImgPipeline, StableDiffusionXLInpaintPipeline are served: other pipelines draw "
        "other pictures; give the folder of an SDXL base model",
    ),
    WrongFolder(
        "a part that SDXL does not have",
        _with_index(controlnet=["diffusers", "ControlNetModel"]),
        "model_index.json: controlnet is a part that is not served: pictures would be drawn without it; "
        "remove it from the model",
    ),
    WrongFolder(
        "a thousand million layers",
        _with_unet(layers_per_block=10**9),
        "unet/config.json: layers_per_block must be a whole number from 1 to 16 or a list of them, one for "
        "each level, not 1000000000",
    ),
)
