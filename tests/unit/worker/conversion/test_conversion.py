"""Single files become the folder whose networks are those of Diffusers' `from_single_file`, tensor by tensor."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    ControlNetModel,
    ControlNetUnionModel,
    FluxPipeline,
    FluxTransformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
)
from diffusers.loaders import single_file_utils
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from safetensors.torch import load_file, save_file
from transformers import CLIPTokenizer

from bottega.client.checkup.models import read_model_facts
from bottega.errors import ConfigError
from bottega.model_files.configuration_rules import filled_config
from bottega.model_files.controlnet_folder import check_controlnet
from bottega.model_files.digest import model_digest
from bottega.model_files.family_names import class_of
from bottega.model_files.folder_check import check_model_folder
from bottega.model_files.importing import import_file
from bottega.model_files.single_file import read_single_file
from bottega.model_files.single_file_check import check_header, with_parts
from bottega.model_files.single_file_config import derive_configurations
from bottega.model_files.single_file_kind import FileKind
from bottega.model_files.single_file_transformer import WITHOUT_T5
from bottega.process.engine_supervisor import engine_environment
from bottega.worker.conversion.folder import convert_file, write_vocabulary
from bottega.worker.conversion.tensors import check_part
from tests.samples import published_configs, stable_diffusion_configs
from tests.samples.family_models import family_model
from tests.samples.single_files import (
    SHAPES,
    TRUE_SHAPES,
    flux_tensors,
    random_tensors,
    write_controlnet_file,
    write_single_file,
    write_vae_file,
    write_zeros_file,
)

PIPELINES = {
    "sd15": StableDiffusionPipeline,
    "sd21": StableDiffusionPipeline,
    "sdxl": StableDiffusionXLPipeline,
    "sd3": StableDiffusion3Pipeline,
    "flux": FluxPipeline,
}
_FLUX_WIDTH = 3072
# Of what Python and the allocator do.
_SLACK_BYTES = 48 << 20
PUBLISHED = {
    "sd15": {part: stable_diffusion_configs.sd15()[part] for part in ("unet", "vae", "text_encoder")},
    "sd21": {part: stable_diffusion_configs.sd21()[part] for part in ("unet", "vae", "text_encoder")},
    "sdxl": {
        "unet": published_configs.unet(),
        "vae": published_configs.vae(),
        "text_encoder": published_configs.text_encoder(),
        "text_encoder_2": published_configs.text_encoder_2(),
    },
    "sd3": {
        "transformer": stable_diffusion_configs.sd35_transformer(),
        "vae": stable_diffusion_configs.sd35_vae(),
        "text_encoder": published_configs.text_encoder(),
        "text_encoder_2": published_configs.text_encoder_2(),
    },
    "flux": {
        "transformer": stable_diffusion_configs.flux_transformer(),
        "vae": stable_diffusion_configs.flux_vae(),
        "text_encoder": published_configs.text_encoder(),
        "text_encoder_2": stable_diffusion_configs.t5_xxl(),
    },
}
PARTS = ("unet", "transformer", "vae", "text_encoder", "text_encoder_2")
NO_T5 = dict.fromkeys(("text_encoder_3", "tokenizer_3"))


@pytest.fixture
def stock_flux_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Diffusers convert tiny models of Flux.1: its converter has the width of the published ones in its code."""
    convert = single_file_utils.convert_flux_transformer_checkpoint_to_diffusers
    code, width = convert.__code__, SHAPES["flux"].widths[0]
    constants = tuple(width if each == _FLUX_WIDTH else each for each in code.co_consts)
    assert constants.count(width) == 1
    tiny = FunctionType(code.replace(co_consts=constants), convert.__globals__)
    monkeypatch.setitem(SINGLE_FILE_LOADABLE_CLASSES["FluxTransformer2DModel"], "checkpoint_mapping_fn", tiny)


@pytest.mark.usefixtures("stock_flux_width")
@pytest.mark.parametrize("family", PIPELINES)
def test_a_model_equals_that_of_from_single_file(family: str, tmp_path: Path) -> None:
    file = write_single_file(tmp_path / "model.safetensors", family)

    done = convert_file(file, tmp_path / "model", parts=family_model("Flux dev") if family == "flux" else None)

    assert (done.is_new, done.source.family) == (True, family)
    report = check_model_folder(done.folder)
    assert (report.problems, report.family) == ((), family)
    left_out = NO_T5 if family == "sd3" else {}
    stock = PIPELINES[family].from_single_file(str(file), config=str(done.folder), local_files_only=True, **left_out)
    ours = PIPELINES[family].from_pretrained(done.folder, local_files_only=True, use_safetensors=True, **left_out)
    for part in PARTS:
        if (wanted := getattr(stock, part, None)) is not None:
            assert_equal(wanted, getattr(ours, part))


@pytest.mark.parametrize("family", PIPELINES)
def test_published_models_get_their_published_configurations(family: str, tmp_path: Path) -> None:
    source = read_single_file(write_zeros_file(tmp_path / "model.safetensors", family, TRUE_SHAPES[family]))
    derived = derive_configurations(source)
    assert derived.keys() == PUBLISHED[family].keys()
    for part, config in derived.items():
        check_part(source, part, config)
        assert _effective(part, family, config) == _effective(part, family, PUBLISHED[family][part])


def _effective(part: str, family: str, config: Mapping[str, object]) -> dict[str, object]:
    """Return the fields that a network reads, with defaults; null is false."""
    unread = {
        "architectures",
        "torch_dtype",
        "transformers_version",
        "projection_dim" if part == "text_encoder" else "",
    }
    filled = filled_config(class_of(part, family), config)
    return {name: value for name, value in filled.items() if value and not (name.startswith("_") or name in unread)}


def test_a_unet_for_inpainting_makes_a_pipeline_for_inpainting(tmp_path: Path) -> None:
    file = write_single_file(tmp_path / "model.safetensors", "sdxl", shape=replace(SHAPES["sdxl"], in_channels=9))
    folder = convert_file(file, tmp_path / "model").folder
    report = check_model_folder(folder)
    assert (report.pipeline_class, report.problems) == ("StableDiffusionXLInpaintPipeline", ())


@pytest.mark.parametrize(("family", "part"), [("sdxl", "text_encoder"), ("sd3", "text_encoder_2")])
def test_a_text_encoder_without_the_prefix_text_model_is_the_same(family: str, part: str, tmp_path: Path) -> None:
    file = write_single_file(tmp_path / "model.safetensors", family)
    bare = {name.replace(".text_model.", "."): tensor for name, tensor in load_file(file).items()}
    save_file(bare, tmp_path / "bare.safetensors")
    folders = [convert_file(tmp_path / f"{name}.safetensors", tmp_path / name).folder for name in ("model", "bare")]
    expected, actual = (load_file(folder / part / "model.safetensors") for folder in folders)
    assert expected.keys() == actual.keys()
    assert all(torch.equal(tensor, actual[name]) for name, tensor in expected.items())
    assert check_header(read_single_file(tmp_path / "bare.safetensors"))


def test_a_transformer_without_norms_and_second_attention_is_that_of_from_single_file(tmp_path: Path) -> None:
    """As that of Stable Diffusion 3 medium. The other file's is as that of 3.5 medium."""
    file = write_single_file(tmp_path / "model.safetensors", "sd3", shape=replace(SHAPES["sd3"], dual=()))
    folder = convert_file(file, tmp_path / "model").folder
    assert check_model_folder(folder).problems == ()
    stock, ours = (
        StableDiffusion3Pipeline.from_single_file(str(file), config=str(folder), local_files_only=True, **NO_T5),
        StableDiffusion3Pipeline.from_pretrained(folder, local_files_only=True, use_safetensors=True, **NO_T5),
    )
    assert_equal(stock.transformer, ours.transformer)
    assert ours.transformer.config.qk_norm is None
    assert ours.text_encoder.text_projection.weight.equal(torch.eye(64))  # as Diffusers takes it


@pytest.mark.usefixtures("stock_flux_width")
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_a_transformer_alone_gets_its_other_parts_from_a_folder(prefix: str, tmp_path: Path) -> None:
    """Of Flux.1, as Black Forest Labs publish it, and with the names that ComfyUI saves. The VAE is that of a file."""
    shape = replace(SHAPES["flux"], layers=1, singles=1, clip=(32, 2), t5=(96, 2, 2, 40))
    named = [(f"{prefix}{name}", extents) for name, extents in flux_tensors(shape)]
    file, vae = tmp_path / "flux.safetensors", write_vae_file(tmp_path / "ae.safetensors", latent=16)
    save_file(random_tensors(named, dtype=torch.float16), file)
    others = family_model("Flux dev")
    with pytest.raises(ConfigError) as refused:
        convert_file(file, tmp_path / "flux")
    assert refused.value.message == (
        f"{file} cannot be converted: it lacks text_encoder, text_encoder_2, tokenizer, tokenizer_2, vae; name the "
        "folder of a Flux.1 model that has them with --parts of `bottega up` or `bottega models import`"
    )
    folder = convert_file(file, tmp_path / "flux", parts=others).folder
    assert check_model_folder(folder).problems == ()
    assert (folder / "text_encoder_2").resolve() == others / "text_encoder_2"
    stock, ours = (
        FluxTransformer2DModel.from_single_file(str(file), config=str(folder), subfolder="transformer"),
        FluxTransformer2DModel.from_pretrained(folder, subfolder="transformer", use_safetensors=True),
    )
    assert_equal(stock, ours)
    assert not convert_file(file, tmp_path / "flux", parts=others).is_new
    replaced = convert_file(file, tmp_path / "other", vae=vae, parts=others).folder
    assert check_model_folder(replaced).problems == ()
    assert (replaced / "vae").resolve() == replaced / "vae"
    with pytest.raises(ConfigError, match="was imported from another file"):
        convert_file(file, tmp_path / "other", parts=others)
    missing = f"{prefix}single_blocks.0.linear1.bias"
    save_file({name: tensor for name, tensor in load_file(file).items() if name != missing}, file)
    with pytest.raises(ValueError, match=r"not that of a Flux.1 model: it lacks single_blocks.0.linear1.bias"):
        check_header(with_parts(read_single_file(file), others))
    with pytest.raises(ConfigError, match=r"not that of a Flux.1 model: it lacks single_blocks.0.linear1.bias"):
        convert_file(file, tmp_path / "third", parts=others)


@pytest.mark.parametrize(
    ("options", "pipeline", "shift"),
    [
        ({"guided": False}, "FluxPipeline", (1.0, False)),
        ({"in_channels": 4 * (2 * 16 + 2**2)}, "FluxFillPipeline", (3.0, True)),
    ],
    ids=["schnell", "Fill"],
)
def test_a_transformer_of_flux_tells_its_pipeline_and_its_schedule(
    options: dict[str, Any], pipeline: str, shift: tuple[float, bool], tmp_path: Path
) -> None:
    shape = replace(SHAPES["flux"], layers=1, singles=1, **options)
    file = write_single_file(tmp_path / "model.safetensors", "flux", shape=shape)
    folder = convert_file(file, tmp_path / "model", parts=family_model("Flux dev")).folder
    report = check_model_folder(folder)
    assert (report.problems, report.pipeline_class) == ((), pipeline)
    scheduler = json.loads((folder / "scheduler" / "scheduler_config.json").read_bytes())
    assert (scheduler["shift"], scheduler["use_dynamic_shifting"]) == shift


def test_a_folder_gives_stable_diffusion_3_its_t5(tmp_path: Path) -> None:
    shape = replace(SHAPES["sd3"], context=96, clip=(32, 2), clip_g=(64, 2), dual=())
    file = write_single_file(tmp_path / "model.safetensors", "sd3", shape=shape)
    folder = convert_file(file, tmp_path / "model", parts=family_model("SD 3")).folder
    report = check_model_folder(folder)
    assert report.problems == ()
    assert report.parts["text_encoder_3"].parameters > 0
    assert not (folder / "text_encoder").is_symlink()


@pytest.mark.parametrize(
    ("family", "others", "sentence"),
    [
        ("flux", "SD 3", "its model is of Stable Diffusion 3, and the file is of Flux.1"),
        (
            "sd15",
            "nothing",
            (
                "there is no such folder; give the folder of a model in Diffusers' layout (nothing is downloaded from "
                "a hub: `hf download REPOSITORY --local-dir FOLDER` does that)"
            ),
        ),
    ],
)
def test_a_folder_of_parts_without_a_fitting_model_is_refused(
    family: str, others: str, sentence: str, tmp_path: Path
) -> None:
    file = write_single_file(tmp_path / "model.safetensors", family)
    parts = tmp_path / others if others == "nothing" else family_model(others)
    with pytest.raises(ConfigError) as refused:
        convert_file(file, tmp_path / "model", parts=parts)
    assert (
        refused.value.message == f"{file} cannot be converted: the folder {parts} of --parts cannot be used: {sentence}"
    )


def test_a_folder_that_lacks_parts_too_is_named(tmp_path: Path) -> None:
    parts = shutil.copytree(family_model("Flux dev"), tmp_path / "parts")
    file = write_single_file(tmp_path / "model.safetensors", "flux")
    (parts / "tokenizer_2" / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"its parts and those of {parts} do not fit each other: tokenizer_2"):
        convert_file(file, tmp_path / "model", parts=parts)
    shutil.rmtree(parts / "tokenizer_2")
    with pytest.raises(ConfigError) as refused:
        convert_file(file, tmp_path / "model", parts=parts)
    assert refused.value.message == (
        f"{file} cannot be converted: it and the folder {parts} lack tokenizer_2; download the folder again"
    )


def test_a_model_of_flow_matching_says_that_it_draws_without_t5(tmp_path: Path) -> None:
    file = write_single_file(tmp_path / "model.safetensors", "sd3")
    source = read_single_file(file)
    assert (source.prediction_type, source.prediction_is_guess) == ("flow", False)
    result = asyncio.run(import_file(file, tmp_path / "model"))
    assert result.summary == f"Prediction type: flow, from its family. {WITHOUT_T5}"
    facts = read_model_facts(str(file))
    assert (facts.default_size, facts.sampler, facts.prediction_type) == (256, "flow_match_euler", "flow")
    assert facts.advice.endswith(WITHOUT_T5)


@pytest.mark.parametrize("family", PIPELINES)
def test_a_check_of_the_header_expects_the_names_that_the_converter_reads(family: str, tmp_path: Path) -> None:
    """Each tensor of the UNet and the VAE is missed by its original name, as the converter misses it."""
    file = write_single_file(tmp_path / "model.safetensors", family)
    source = read_single_file(file)
    if family == "flux":
        source = with_parts(source, family_model("Flux dev"))
    assert check_header(source).keys() == source.parts.keys()
    if family in ("sd3", "flux"):
        return
    net = read_single_file(write_controlnet_file(tmp_path / "net.safetensors", family))
    assert check_header(net).keys() == {"controlnet"}


def test_a_model_without_a_vae_gets_that_of_a_file(tmp_path: Path) -> None:
    file = write_single_file(tmp_path / "whole.safetensors", "sd15")
    tensors = load_file(file)
    save_file(
        {name: tensor for name, tensor in tensors.items() if "first_stage" not in name}, tmp_path / "m.safetensors"
    )
    with pytest.raises(ConfigError) as refused:
        convert_file(tmp_path / "m.safetensors", tmp_path / "m")
    assert refused.value.message == (
        f"{tmp_path / 'm.safetensors'} cannot be converted: it has no VAE; give the file of one with --vae, in a "
        "worker's configuration as engine.vae.folder"
    )
    vae = write_vae_file(tmp_path / "vae.safetensors")
    done = convert_file(tmp_path / "m.safetensors", tmp_path / "m", vae=vae)
    assert check_model_folder(done.folder).problems == ()
    alone = convert_file(vae, tmp_path / "vae", "sd15").folder
    weights = "diffusion_pytorch_model.safetensors"
    assert (done.folder / "vae" / weights).read_bytes() == (alone / weights).read_bytes()
    os.utime(vae, ns=(0, 0))
    assert not convert_file(tmp_path / "m.safetensors", tmp_path / "m", vae=vae).is_new
    other = write_vae_file(tmp_path / "other.safetensors", seed=1)
    os.utime(other, ns=(0, 0))
    with pytest.raises(ConfigError, match="imported from another file"):
        convert_file(tmp_path / "m.safetensors", tmp_path / "m", vae=other)
    with pytest.raises(ConfigError, match="was imported from another file or as another family"):
        convert_file(tmp_path / "m.safetensors", tmp_path / "m", vae=write_vae_file(vae, prefix="vae."))


def test_a_folder_that_cannot_be_written_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vae = write_vae_file(tmp_path / "vae.safetensors")
    with pytest.raises(ConfigError) as refused:
        convert_file(vae, tmp_path, "sd15")
    assert refused.value.message == (
        f"{vae} cannot be converted: {tmp_path} is there already, and no import made it; name another folder with --to"
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    with pytest.raises(ConfigError) as refused:
        convert_file(vae, tmp_path / "vae", "sd15")
    needed = (vae.stat().st_size + (16 << 20)) >> 20
    assert refused.value.message == (
        f"{vae} cannot be converted: it needs {needed} MiB in {tmp_path}, and 1 MiB are free; delete files there, or "
        "name a folder on another disk with --to"
    )


@pytest.mark.parametrize("prefix", ["", "first_stage_model."])
def test_a_vae_equals_that_of_from_single_file(prefix: str, tmp_path: Path) -> None:
    file = write_vae_file(tmp_path / "vae.safetensors", prefix=prefix)
    folder = convert_file(file, tmp_path / "vae", "sdxl").folder
    stock = AutoencoderKL.from_single_file(str(file), config=str(folder), local_files_only=True)
    ours = AutoencoderKL.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    assert_equal(stock, ours)
    assert (ours.config.scaling_factor, ours.config.latent_channels) == (0.13025, 4)


def test_a_vae_of_sixteen_channels_replaces_that_of_stable_diffusion_3(tmp_path: Path) -> None:
    file = write_vae_file(tmp_path / "vae.safetensors", latent=16, seed=1)
    assert read_model_facts(str(file)).problems == ()
    whole = write_single_file(tmp_path / "model.safetensors", "sd3")
    folder = convert_file(whole, tmp_path / "model", vae=file).folder
    stock = AutoencoderKL.from_single_file(str(file), config=str(folder / "vae"), local_files_only=True)
    ours = AutoencoderKL.from_pretrained(folder / "vae", local_files_only=True, use_safetensors=True)
    assert_equal(stock, ours)
    assert (ours.config.scaling_factor, ours.config.shift_factor, ours.config.latent_channels) == (1.5305, 0.0609, 16)
    four = write_vae_file(tmp_path / "four.safetensors")
    with pytest.raises(ConfigError, match="in_channels must be 4"):
        convert_file(whole, tmp_path / "other", vae=four)


@pytest.mark.parametrize(("family", "prefix"), [("sd15", "control_model."), ("sd21", ""), ("sdxl", "control_model.")])
def test_a_controlnet_equals_that_of_from_single_file(family: str, prefix: str, tmp_path: Path) -> None:
    file = write_controlnet_file(tmp_path / "net.safetensors", family, prefix=prefix)
    done = convert_file(file, tmp_path / "net")
    ours = ControlNetModel.from_pretrained(done.folder, local_files_only=True, use_safetensors=True)
    assert done.source.family == family
    # Diffusers' from_single_file knows SDXL's ControlNets by other names alone; its converter knows these.
    if family != "sdxl":
        assert_equal(ControlNetModel.from_single_file(str(file), config=str(done.folder), local_files_only=True), ours)


def test_a_controlnet_in_diffusers_layout_equals_that_of_from_single_file(tmp_path: Path) -> None:
    original = write_controlnet_file(tmp_path / "original.safetensors", "sdxl")
    folder = convert_file(original, tmp_path / "original").folder
    # Published single files of SDXL's ControlNets are such a folder's weights, without its configuration.
    file = Path(shutil.copy(folder / "diffusion_pytorch_model.safetensors", tmp_path / "net.safetensors"))
    done = convert_file(file, tmp_path / "net")
    assert (done.source.family, done.source.kind) == ("sdxl", FileKind.CONTROLNET)
    assert json.loads((done.folder / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
    assert check_controlnet("net", done.folder, None) == ""
    ours = ControlNetModel.from_pretrained(done.folder, local_files_only=True, use_safetensors=True)
    assert_equal(ControlNetModel.from_single_file(str(file), config=str(folder), local_files_only=True), ours)


def test_a_union_in_diffusers_layout_equals_that_of_its_folder(tmp_path: Path) -> None:
    net = ControlNetUnionModel(
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        attention_head_dim=[1, 2],
        block_out_channels=(64, 128),
        conditioning_embedding_out_channels=(16, 32, 96, 256),
        cross_attention_dim=32,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        layers_per_block=1,
        num_control_type=8,
        num_proj_channel=64,
        num_trans_channel=64,
        projection_class_embeddings_input_dim=64,
        transformer_layers_per_block=[1, 2],
        use_linear_projection=True,
    )
    net.save_pretrained(tmp_path / "published")
    file = Path(
        shutil.copy(tmp_path / "published" / "diffusion_pytorch_model.safetensors", tmp_path / "net.safetensors")
    )
    done = convert_file(file, tmp_path / "net")
    assert (done.source.family, done.source.kind) == ("sdxl", FileKind.CONTROLNET)
    assert check_controlnet("net", done.folder, None) == ""
    ours = ControlNetUnionModel.from_pretrained(done.folder, local_files_only=True, use_safetensors=True)
    assert_equal(net, ours)
    read = {name: value for name, value in ours.config.items() if not name.startswith("_")}
    assert read == json.loads(json.dumps({name: net.config[name] for name in read}))  # files have no tuples


def test_a_vae_of_a_file_replaces_the_one_of_a_model(tmp_path: Path) -> None:
    model = convert_file(write_single_file(tmp_path / "model.safetensors", "sdxl"), tmp_path / "model").folder
    file = write_vae_file(
        tmp_path / "vae.safetensors", extra={"loss.num_batches_tracked": torch.zeros((), dtype=torch.int64)}
    )
    vae = convert_file(file, tmp_path / "vae", "sdxl").folder
    assert check_model_folder(model, vae=vae).problems == ()
    digests = {model_digest(check_model_folder(model, vae=vae))}
    shutil.rmtree(vae)
    os.utime(file, ns=(0, 0))  # as on another machine
    convert_file(file, vae, "sdxl")
    digests.add(model_digest(check_model_folder(model, vae=vae)))
    assert len(digests) == 1


def test_a_conversion_takes_little_more_memory_than_the_largest_part(tmp_path: Path) -> None:
    small = write_single_file(tmp_path / "small.safetensors", "sdxl")
    shape = replace(SHAPES["sdxl"], widths=(320, 640), layers=2, depths=(0, 4), middle_depth=4)
    large = write_zeros_file(tmp_path / "large.safetensors", "sdxl", shape)
    unet_bytes = sum(entry.end - entry.begin for entry in read_single_file(large).parts["unet"])
    assert large.stat().st_size > unet_bytes > 4 * _SLACK_BYTES, "large enough to tell"
    paths = (str(path) for file in (small, large) for path in (file, file.with_suffix("")))
    command = [sys.executable, "-m", "tests.support.conversion_memory", *paths]
    # That of an engine process, so that it can be a fork that has imported torch (see warm_engines.py).
    environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error", **engine_environment(exclusive_cores=False)}
    taken = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120, env=environment).stdout
    assert int(taken) <= 1.2 * unet_bytes + _SLACK_BYTES


def test_the_tokenizer_is_that_of_clip(tmp_path: Path) -> None:
    write_vocabulary(tmp_path)
    tokenizer = CLIPTokenizer.from_pretrained(tmp_path, local_files_only=True)
    # The numbers of openai/clip-vit-large-patch14.
    assert tokenizer("a photo of a cat").input_ids == [49406, 320, 1125, 539, 320, 2368, 49407]
    assert len(tokenizer) == 49408


@pytest.mark.parametrize(
    ("family", "extra", "prediction", "size"),
    [("sd21", (), "v_prediction", 96), ("sd15", (), "epsilon", 64), ("sdxl", ("v_pred", "ztsnr"), "v_prediction", 128)],
)
def test_the_schedule_is_that_of_the_training(
    family: str, extra: tuple[str, ...], prediction: str, size: int, tmp_path: Path
) -> None:
    file = write_single_file(tmp_path / "model.safetensors", family, extra=extra)
    folder = convert_file(file, tmp_path / "model").folder
    scheduler = json.loads((folder / "scheduler" / "scheduler_config.json").read_bytes())
    assert scheduler["prediction_type"] == prediction
    assert scheduler.get("rescale_betas_zero_snr", False) == ("ztsnr" in extra)
    assert json.loads((folder / "unet" / "config.json").read_bytes())["sample_size"] == size
    assert check_model_folder(folder).problems == ()


def test_the_prediction_type_is_the_operators_or_that_of_the_file(tmp_path: Path) -> None:
    file = write_single_file(tmp_path / "base.safetensors", "sd21")
    guessed, chosen = read_single_file(file), read_single_file(file, prediction_type="epsilon")
    assert (guessed.prediction_type, guessed.prediction_is_guess) == ("v_prediction", True)
    assert (chosen.prediction_type, chosen.prediction_is_guess) == ("epsilon", False)
    folder = convert_file(file, tmp_path / "base", prediction_type="epsilon").folder
    assert json.loads((folder / "scheduler" / "scheduler_config.json").read_bytes())["prediction_type"] == "epsilon"
    assert json.loads((folder / "unet" / "config.json").read_bytes())["sample_size"] == 64
    inpainting = write_single_file(tmp_path / "in.safetensors", "sd21", shape=replace(SHAPES["sd21"], in_channels=9))
    source = read_single_file(inpainting)
    assert source.prediction_type == "epsilon"
    assert derive_configurations(source)["unet"]["sample_size"] == 64


def test_a_second_import_finds_the_first(tmp_path: Path) -> None:
    file = write_vae_file(tmp_path / "vae.safetensors")
    convert_file(file, tmp_path / "vae", "sdxl")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "vae").iterdir()}
    os.utime(file)  # as after copying it
    assert not convert_file(file, tmp_path / "vae", "sdxl").is_new
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "vae").iterdir()} == before
    with pytest.raises(ConfigError, match="was imported from another file or as another family"):
        convert_file(file, tmp_path / "vae", "sd15")
    write_vae_file(file, prefix="vae.")
    with pytest.raises(ConfigError, match="was imported from another file or as another family"):
        convert_file(file, tmp_path / "vae", "sdxl")


# It is killed when it has made a folder, before it computes: torch takes seconds to import.
_KILLED = """
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace
from bottega.worker.conversion import folder

sys.modules["bottega.worker.conversion.tensors"] = SimpleNamespace(check_part=print, convert_part=print)
folder._write_json = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
folder.convert_file(Path(sys.argv[1]), Path(sys.argv[2]), "sdxl")
"""


def test_a_killed_import_leaves_nothing_that_the_next_does_not_remove(tmp_path: Path) -> None:
    file = write_vae_file(tmp_path / "vae.safetensors")
    done = subprocess.run([sys.executable, "-c", _KILLED, str(file), str(tmp_path / "vae")], timeout=60, check=False)
    assert done.returncode == -9
    assert not (tmp_path / "vae").exists()
    assert len(list(tmp_path.glob(".vae.importing-*"))) == 1
    convert_file(file, tmp_path / "vae", "sdxl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["vae", "vae.safetensors"]


def assert_equal(wanted: torch.nn.Module, found: torch.nn.Module) -> None:
    tensors = found.state_dict()
    assert wanted.state_dict().keys() == tensors.keys()
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(tensor.float(), tensors[name].float()), name
