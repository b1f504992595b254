"""Checks a model's folder: what it is, its parts' configurations, the headers of their weights, its tokenizers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from bottega.model_files.configuration_rules import CONFIG_FILES, INDEX_FILE, check_configurations, filled_config
from bottega.model_files.families import SDXL, describe_other, family_of
from bottega.model_files.json_files import is_there, read_json_object
from bottega.model_files.location import name_of
from bottega.model_files.presets import PRESET_FILE, Preset, propose_preset, read_preset
from bottega.model_files.report import ModelReport, PartReport
from bottega.model_files.tensor_check import check_tensors
from bottega.model_files.tokenizer_check import check_tokenizer
from bottega.model_files.vae_rules import latent_scale
from bottega.model_files.weights import DIFFUSERS, TRANSFORMERS, Weights, choose_variant, read_weights, variants_of

_NAMING = {"text_encoder": TRANSFORMERS, "text_encoder_2": TRANSFORMERS, "unet": DIFFUSERS, "vae": DIFFUSERS}
_TOKENIZERS = {"tokenizer": "text_encoder", "tokenizer_2": "text_encoder_2"}


def check_model_folder(folder: Path) -> ModelReport:
    """Return what a model's folder is and every reason why it cannot be served.

    It opens no weights: configurations, indexes and headers alone, some milliseconds for SDXL.
    """
    path = folder / INDEX_FILE
    if not is_there(path):
        return ModelReport(folder=folder, problems=(describe_other(folder),))
    try:
        index = read_json_object(path)
    except ValueError as error:
        return ModelReport(folder=folder, problems=(f"{INDEX_FILE}: {error}",))
    family, unserved = family_of(folder, index)
    pipeline_class = str(index.get("_class_name", ""))
    if unserved:
        what = f"{INDEX_FILE}: {unserved}"
        return ModelReport(folder=folder, family=family, pipeline_class=pipeline_class, problems=(what,))
    return _check_parts(folder, index, pipeline_class)


def _check_parts(folder: Path, index: Mapping[str, object], pipeline_class: str) -> ModelReport:
    configs, problems = _read_configs(folder, index)
    preset: Preset | None = None
    try:
        preset = read_preset(folder)
    except ValueError as error:
        problems.append(f"{PRESET_FILE}: {error}")
    problems += check_configurations(index, configs, preset)
    weights, broken = _read_weights(folder)
    problems += broken
    if not problems:
        problems += _check_contents(folder, configs, weights)
    proposal = None if problems or preset else propose_preset(name_of(str(folder)), configs["scheduler"])
    return ModelReport(
        folder=folder,
        family=SDXL,
        pipeline_class=pipeline_class,
        parts={name: _part(name, index, configs.get(name, {}), weights.get(name)) for name in CONFIG_FILES},
        variant=next((part.variant for part in weights.values() if part.variant), ""),
        default_size=0 if problems else _default_size(configs),
        problems=tuple(problems),
        proposal=proposal,
    )


def _read_configs(folder: Path, index: Mapping[str, object]) -> tuple[dict[str, Mapping[str, object]], list[str]]:
    """Return the configuration of each part that has one, and a sentence for each that has none."""
    configs: dict[str, Mapping[str, object]] = {}
    problems = []
    for name, file in CONFIG_FILES.items():
        try:
            # Diffusers writes -Infinity into configurations of schedulers.
            configs[name] = read_json_object(folder / name / file, allow_infinity=name == "scheduler")
        except ValueError as error:
            if is_there(folder / name):
                problems.append(f"{name}/{file}: {error}")
            else:
                problems.append(f"the folder {name} is missing; download the model again, with all parts")
    if "scheduler" in configs and (class_name := _class_name(index, "scheduler")):
        # Diffusers makes one of this class, whatever the file says.
        configs["scheduler"] = {**configs["scheduler"], "_class_name": class_name}
    return configs, problems


def _read_weights(folder: Path) -> tuple[dict[str, Weights], list[str]]:
    """Return each part's weights in the variant that the model is loaded in, and a sentence for each that has none."""
    variants, problems = {}, []
    weights: dict[str, Weights] = {}
    there = {name: naming for name, naming in _NAMING.items() if is_there(folder / name)}
    for name, naming in there.items():
        try:
            variants[name] = variants_of(folder / name, naming)
        except ValueError as error:
            problems.append(str(error))
    if problems or not variants:
        return {}, problems
    try:
        variant = choose_variant(variants)
    except ValueError as error:
        return {}, [str(error)]
    for name, naming in there.items():
        try:
            weights[name] = read_weights(folder / name, naming, variant)
        except ValueError as error:
            problems.append(str(error))
    return weights, problems


def _check_contents(
    folder: Path, configs: Mapping[str, Mapping[str, object]], weights: Mapping[str, Weights]
) -> Iterator[str]:
    """Yield a sentence for each part whose tensors or tokens do not fit its configuration. Its rules hold."""
    for name, part in weights.items():
        yield from check_tensors(name, filled_config(name, configs[name]), part)
    for name, encoder in _TOKENIZERS.items():
        vocab_size = filled_config(encoder, configs[encoder])["vocab_size"]
        yield from check_tokenizer(folder / name, configs[name], vocab_size=vocab_size)


def _part(name: str, index: Mapping[str, object], config: Mapping[str, object], weights: Weights | None) -> PartReport:
    class_name = _class_name(index, name)
    if weights is None:
        return PartReport(name=name, class_name=class_name, config=config)
    return PartReport(
        name=name,
        class_name=class_name,
        config=config,
        variant=weights.variant,
        files=weights.files,
        bytes_by_dtype=weights.bytes_by_dtype,
        parameters=weights.parameters,
    )


def _default_size(configs: Mapping[str, Mapping[str, object]]) -> int:
    unet, vae = (filled_config(name, configs[name]) for name in ("unet", "vae"))
    return int(unet["sample_size"]) * latent_scale(vae)


def _class_name(index: Mapping[str, object], part: str) -> str:
    entry = index.get(part)
    return str(entry[1]) if isinstance(entry, list) and len(entry) == 2 and entry[1] is not None else ""
