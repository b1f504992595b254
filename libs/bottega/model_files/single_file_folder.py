"""The JSON files of a folder that is made from a single file: index, scheduler and tokenizers. No torch.

They have the values of the published folders (see `FamilyFacts`).
"""

from __future__ import annotations

from collections.abc import Mapping

from bottega.model_files.family_names import (
    FAMILIES,
    FLUX,
    OPTIONAL_PARTS,
    PARTS,
    SD3,
    SDXL,
    TRANSFORMER,
    UNET,
    denoiser_part,
)
from bottega.model_files.single_file import SingleFile
from bottega.model_files.single_file_config import VERSION, Config
from bottega.model_files.single_file_transformer import GUIDANCE

_START, _END = "<|startoftext|>", "<|endoftext|>"


def index_of(source: SingleFile, configs: Mapping[str, Config]) -> Config:
    """Return the model_index.json of a whole model with these configurations of its parts."""
    denoiser = configs[denoiser_part(source.family)]
    is_inpainting = (denoiser["out_channels"] or denoiser["in_channels"]) != denoiser["in_channels"]
    return model_index(source.family, is_inpainting=is_inpainting, optional=frozenset(source.others))


def model_index(family: str, *, is_inpainting: bool = False, optional: frozenset[str] = frozenset()) -> Config:
    """Return the model_index.json of a family.

    Args:
        is_inpainting: Whether the denoising network takes a mask and a masked picture as well.
        optional: Parts that it has although a model may leave them out.
    """
    facts, inpaints = FAMILIES[family], "Fill" if family == FLUX else "Inpaint"
    pipeline = facts.pipeline.replace("Pipeline", f"{inpaints}Pipeline" if is_inpainting else "Pipeline")
    index: Config = {"_class_name": pipeline, "_diffusers_version": VERSION}
    if family == SDXL:
        index["force_zeros_for_empty_prompt"] = True
    elif UNET in PARTS[family]:
        # Files of this layout have no filter of pictures.
        index |= {"safety_checker": [None, None], "feature_extractor": [None, None], "requires_safety_checker": False}
    parts: Config = {part: list(kind) for part, kind in PARTS[family].items()}
    parts |= {part: [None, None] for part in OPTIONAL_PARTS.get(family, frozenset()) - optional}
    return index | parts | {"scheduler": ["diffusers", facts.scheduler]}


def scheduler_config(source: SingleFile) -> Config:
    """Return the scheduler_config.json of a family, with what the file says of its training."""
    config: Config = {
        "_class_name": FAMILIES[source.family].scheduler,
        "_diffusers_version": VERSION,
        "num_train_timesteps": 1000,
    }
    if source.family == SD3:
        return config | {"shift": 3.0, "use_dynamic_shifting": False}
    if source.family == FLUX:
        # Schnell alone embeds no guidance, and has no shift.
        is_guided = any(GUIDANCE in entry.name for entry in source.parts[TRANSFORMER])
        config |= {"base_image_seq_len": 256, "base_shift": 0.5, "max_image_seq_len": 4096, "max_shift": 1.15}
        return config | {"shift": 3.0 if is_guided else 1.0, "use_dynamic_shifting": is_guided}
    config |= {
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "beta_start": 0.00085,
        "clip_sample": False,
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
