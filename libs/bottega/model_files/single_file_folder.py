"""The files of a folder that is made from a single file, besides its networks: index, scheduler and tokenizers.

Their values are those of the published folders; see `FamilyFacts`.
"""

from __future__ import annotations

from collections.abc import Mapping

from bottega.model_files.family_names import FAMILIES
from bottega.model_files.single_file import SingleFile
from bottega.model_files.single_file_config import VERSION, Config

_START, _END = "<|startoftext|>", "<|endoftext|>"


def index_of(source: SingleFile, configs: Mapping[str, Config]) -> Config:
    """Return the model_index.json of a whole model with these configurations of its parts."""
    unet = configs["unet"]
    return model_index(source.family, is_inpainting=unet["in_channels"] != unet["out_channels"])


def model_index(family: str, *, is_inpainting: bool = False) -> Config:
    """Return the model_index.json of a family.

    Args:
        is_inpainting: Whether the UNet takes a mask and a masked picture as well.
    """
    facts = FAMILIES[family]
    pipeline = facts.pipeline.replace("Pipeline", "InpaintPipeline" if is_inpainting else "Pipeline")
    index: Config = {"_class_name": pipeline, "_diffusers_version": VERSION}
    if facts.has_two_encoders:
        index["force_zeros_for_empty_prompt"] = True
        index |= {"text_encoder_2": ["transformers", "CLIPTextModelWithProjection"]}
        index |= {"tokenizer_2": ["transformers", "CLIPTokenizer"]}
    else:
        # Files of this layout have no filter of pictures.
        index |= {"safety_checker": [None, None], "feature_extractor": [None, None], "requires_safety_checker": False}
    return index | {
        "scheduler": ["diffusers", facts.scheduler],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }


def scheduler_config(source: SingleFile) -> Config:
    """Return the scheduler_config.json of a family, with what the file says of its training."""
    config: Config = {
        "_class_name": FAMILIES[source.family].scheduler,
        "_diffusers_version": VERSION,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "beta_start": 0.00085,
        "clip_sample": False,
        "num_train_timesteps": 1000,
        "prediction_type": source.prediction_type,
        "set_alpha_to_one": False,
        "skip_prk_steps": True,
        "steps_offset": 1,
        "trained_betas": None,
    }
    if FAMILIES[source.family].has_two_encoders:
        config |= {"interpolation_type": "linear", "sample_max_value": 1.0, "timestep_spacing": "leading"}
        config |= {"use_karras_sigmas": False}
    if source.zero_terminal_snr:
        # Such a schedule must begin at its last timestep (arXiv 2305.08891, section 3.3).
        config |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    return config


def tokenizer_configs(family: str, part: str) -> dict[str, Config]:
    """Return a tokenizer's JSON files but its vocabulary, by name.

    OpenCLIP's text encoders were trained with 0, the number of "!", behind a prompt's end, and CLIP's with its last.
    """
    pad = "!" if part.replace("tokenizer", "text_encoder") in FAMILIES[family].open_clip else _END
    start, end = (_special(text) for text in (_START, _END))
    special = {"bos_token": start, "eos_token": end, "pad_token": pad, "unk_token": end}
    config = {
        "add_prefix_space": False,
        "bos_token": {"__type": "AddedToken", **start},
        "clean_up_tokenization_spaces": True,
        "do_lower_case": True,
        "eos_token": {"__type": "AddedToken", **end},
        "errors": "replace",
        "model_max_length": 77,
        "pad_token": pad,
        "tokenizer_class": "CLIPTokenizer",
        "unk_token": {"__type": "AddedToken", **end},
    }
    return {"special_tokens_map.json": special, "tokenizer_config.json": config}


def _special(text: str) -> Config:
    return {"content": text, "lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
