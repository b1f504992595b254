"""Checks a model's folder: its kind, its parts' configurations, the headers of their weights, and its tokenizers.

`folder_of` and `name_of` read an operator's configuration: the folder, and the name under which the model is served.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import quote
from types import MappingProxyType

from bottega.miniature import MODELS
from bottega.model_files.configuration_rules import INDEX_FILE, check_configurations, config_files, filled_config
from bottega.model_files.families import describe_other, family_of
from bottega.model_files.family_names import FAMILIES, FLUX, PARTS, class_of, denoiser_part
from bottega.model_files.json_files import is_there, read_json_object
from bottega.model_files.presets import PRESET_FILE, Preset, propose_preset, read_preset
from bottega.model_files.report import ModelReport, PartReport
from bottega.model_files.tensor_check import EXPECTED_TENSORS, check_tensors
from bottega.model_files.tokenizer_check import TOKENIZER_CHECKS, check_tokenizer
from bottega.model_files.vae_rules import latent_scale
from bottega.model_files.weights import DIFFUSERS, TRANSFORMERS, Weights, choose_variant, read_weights, variants_of

# Default side of a latent, for transformers whose configurations do not contain it.
_LATENT_SIDE = FAMILIES[FLUX].latent_side


def check_model_folder(folder: Path, variant: str = "", *, vae: Path | None = None) -> ModelReport:
    """Return a report on a model's folder, with every reason why it cannot be served.

    It only reads configurations, indexes and headers, which takes some milliseconds for SDXL.

    Args:
        variant: Variant of the weights to be loaded, such as `fp16`; see `choose_variant`.
        vae: Folder of a VAE that replaces the model's own.
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
    return _check_parts(folder, index, family, variant, vae)


def _check_parts(folder: Path, index: Mapping[str, object], family: str, variant: str, vae: Path | None) -> ModelReport:
    files = config_files(family, index)
    places = {name: folder / name for name in files}
    if vae is not None:
        places["vae"] = vae
    if vae is not None and (wrong := _vae_problem(vae)):
        return ModelReport(folder=folder, family=family, problems=(wrong,))
    configs, problems = read_configs(places, files, index)
    preset: Preset | None = None
    try:
        preset = read_preset(folder)
    except ValueError as error:
        problems.append(f"{PRESET_FILE}: {error}")
    problems += check_configurations(index, configs, preset, family)
    weights, broken = _read_weights(places, family, variant)
    problems += broken
    if not problems:
        problems += _check_contents(places, family, configs, weights)
    proposal = None if problems or preset else propose_preset(name_of(str(folder)), configs["scheduler"], family)
    return ModelReport(
        folder=folder,
        family=family,
        pipeline_class=str(index.get("_class_name", "")),
        parts={
            name: _part(name, place, index, configs.get(name, {}), weights.get(name)) for name, place in places.items()
        },
        variant=next((part.variant for part in weights.values() if part.variant), ""),
        default_size=0 if problems else default_size(configs, family),
        problems=tuple(problems),
        proposal=proposal,
    )


def _vae_problem(folder: Path) -> str:
    """Return a sentence on why there is no folder of a VAE; empty if there is one."""
    if not is_there(folder):
        return f"the folder {folder} of the VAE is missing; correct engine.vae.folder"
    if folder.is_file():
        importing = f"bottega models import {quote(str(folder))} --family FAMILY"
        return f"engine.vae.folder names the file {folder}; `{importing}` converts it to a folder"
    return ""


def read_configs(
    places: Mapping[str, Path], files: Mapping[str, str], index: Mapping[str, object] = MappingProxyType({})
) -> tuple[dict[str, Mapping[str, object]], list[str]]:
    """Return the configuration of each part that has one, and a sentence for each that has none.

    Args:
        places: Folders of the parts.
        files: Names of their configuration files.
        index: Contents of model_index.json, which says the class of the scheduler.
    """
    configs: dict[str, Mapping[str, object]] = {}
    problems = []
    for name, file in files.items():
        try:
            # Diffusers writes -Infinity into configurations of schedulers.
            configs[name] = read_json_object(places[name] / file, allow_infinity=name == "scheduler")
        except ValueError as error:
            if is_there(places[name]):
                problems.append(f"{places[name].name}/{file}: {error}")
            else:
                problems.append(f"the folder {name} is missing; download the model again, with all parts")
    if "scheduler" in configs and (class_name := _class_name(index, "scheduler")):
        # Diffusers uses this class, whatever the file says.
        configs["scheduler"] = {**configs["scheduler"], "_class_name": class_name}
    return configs, problems


def check_contents(
    places: Mapping[str, Path], family: str, configs: Mapping[str, Mapping[str, object]]
) -> Iterator[str]:
    """Yield a sentence for each part of a model whose weights or tokens are not those of its configuration.

    Args:
        places: Folders of some parts.
        configs: Configurations of all parts, which must be valid.
    """
    weights, problems = _read_weights(places, family, "")
    yield from problems or _check_contents(places, family, configs, weights)


def _read_weights(places: Mapping[str, Path], family: str, wanted: str) -> tuple[dict[str, Weights], list[str]]:
    """Return each part's weights in the variant to be loaded, and a sentence for each part without any."""
    variants, problems = {}, []
    weights: dict[str, Weights] = {}
    there = {
        name: DIFFUSERS if PARTS[family][name][0] == "diffusers" else TRANSFORMERS
        for name, place in places.items()
        if name != "scheduler" and class_of(name, family) in EXPECTED_TENSORS and is_there(place)
    }
    for name, naming in there.items():
        try:
            variants[name] = variants_of(places[name], naming)
        except ValueError as error:
            problems.append(str(error))
    if problems or not variants:
        return {}, problems
    try:
        variant = choose_variant(variants, wanted)
    except ValueError as error:
        return {}, [str(error)]
    for name, naming in there.items():
        try:
            weights[name] = read_weights(places[name], naming, variant)
        except ValueError as error:
            problems.append(str(error))
    return weights, problems


def _check_contents(
    places: Mapping[str, Path],
    family: str,
    configs: Mapping[str, Mapping[str, object]],
    weights: Mapping[str, Weights],
) -> Iterator[str]:
    """Yield a sentence for each part whose tensors or tokens do not fit its configuration, which must be valid."""
    for name, part in weights.items():
        kind = class_of(name, family)
        yield from check_tensors(name, kind, filled_config(kind, configs[name]), part)
    for name in places:
        encoder = name.replace("tokenizer", "text_encoder")
        if encoder == name:
            continue
        kind = class_of(encoder, family)
        vocab_size = filled_config(kind, configs[encoder])["vocab_size"]
        check = TOKENIZER_CHECKS.get(kind, check_tokenizer)
        yield from check(places[name], configs[name], vocab_size=vocab_size)


def _part(
    name: str, place: Path, index: Mapping[str, object], config: Mapping[str, object], weights: Weights | None
) -> PartReport:
    class_name = _class_name(index, name)
    if weights is None:
        return PartReport(name=name, folder=place, class_name=class_name, config=config)
    return PartReport(
        name=name,
        folder=place,
        class_name=class_name,
        config=config,
        variant=weights.variant,
        files=weights.files,
        bytes_by_dtype=weights.bytes_by_dtype,
        parameters=weights.parameters,
    )


def default_size(configs: Mapping[str, Mapping[str, object]], family: str) -> int:
    """Return the side of a picture, in pixels, of a model with these valid configurations of its parts."""
    denoiser, vae = (filled_config(class_of(name, family), configs[name]) for name in (denoiser_part(family), "vae"))
    return int(denoiser.get("sample_size", _LATENT_SIDE)) * latent_scale(vae)


def _class_name(index: Mapping[str, object], part: str) -> str:
    entry = index.get(part)
    return str(entry[1]) if isinstance(entry, list) and len(entry) == 2 and entry[1] is not None else ""


# A repository's folder in the hub's cache: models--OWNER--NAME, with a folder `snapshots` of commits.
_REPOSITORY = "models--"
_SNAPSHOTS = "snapshots"


def folder_of(model: str) -> Path:
    """Return the folder of an embedded model, such as `miniature`, or of a path."""
    return MODELS.get(model) or Path(model)


def name_of(model: str, name: str = "") -> str:
    """Return the name under which a model is served.

    Args:
        model: Name of an embedded model, or a folder's path.
        name: The operator's name for it. If it is empty, the name is that of the repository if the folder is a snapshot
            in a hub's cache, else the folder's.
    """
    if name or model in MODELS:
        return name or model
    # Links are not resolved: their creator chose the name.
    folder = Path(model).resolve() if ".." in Path(model).parts else Path(model).absolute()
    repository = folder.parent.parent.name
    if folder.parent.name == _SNAPSHOTS and repository.startswith(_REPOSITORY):
        return repository.rpartition("--")[2]
    return folder.name
