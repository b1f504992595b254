"""Checks a model's folder: its kind, its parts' configurations, the headers of their weights, and its tokenizers.

`folder_of` and `name_of` read an operator's configuration: the folder, and the name under which the model is served.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from types import MappingProxyType
from typing import Any

from bottega.miniature import MODELS
from bottega.model_files.configuration_rules import INDEX_FILE, check_configurations, config_files, filled_config
from bottega.model_files.families import describe_other, family_of
from bottega.model_files.family_names import FAMILIES, PARTS, class_of, denoiser_part
from bottega.model_files.json_files import DOWNLOAD_AGAIN, is_there, read_json_object, read_model_file
from bottega.model_files.presets import PRESET_FILE, Preset, propose_preset, read_preset
from bottega.model_files.report import ModelReport, PartReport
from bottega.model_files.tensor_check import EXPECTED_TENSORS, check_tensors
from bottega.model_files.vae_rules import latent_scale
from bottega.model_files.weights import DIFFUSERS, TRANSFORMERS, Weights, choose_variant, read_weights, variants_of
from bottega.plain_text import excerpt

# Tokenizer files of CLIP have 2 MiB.
_MAX_TOKENIZER_BYTES = 32 << 20
_SHOWN_CHARACTERS = 60
# Padding, end and unknown token, by their places in T5's vocabulary.
_T5_SPECIAL_TOKENS = 3
_T5_SPECIAL = {"pad_token": "<pad>", "eos_token": "</s>"}
_SPECIAL = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}


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
    proposal = None if problems or preset else propose_preset(name_of(str(folder)), configs["scheduler"])
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
        check = check_tokenizer if kind.startswith("CLIP") else check_t5_tokenizer
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
    # The configurations of Flux's transformers have no size.
    return int(denoiser.get("sample_size", FAMILIES[family].latent_side)) * latent_scale(vae)


def _class_name(index: Mapping[str, object], part: str) -> str:
    entry = index.get(part)
    return str(entry[1]) if isinstance(entry, list) and len(entry) == 2 and entry[1] is not None else ""


def check_tokenizer(folder: Path, config: Mapping[str, object], *, vocab_size: int) -> Iterator[str]:
    """Yield a sentence, with the file's name, for each fault of a tokenizer's vocabulary and merges.

    Args:
        folder: Folder of the tokenizer.
        config: Contents of its tokenizer_config.json.
        vocab_size: Number of tokens that the text encoder knows.
    """
    whole = folder / "tokenizer.json"
    try:
        # transformers prefers tokenizer.json.
        if is_there(whole):
            where, (vocab, merges) = f"{folder.name}/{whole.name}", _read_whole(whole)
        else:
            where, (vocab, merges) = f"{folder.name}/vocab.json", _read_pair(folder)
    except ValueError as error:
        yield str(error)
        return
    if any(type(number) is not int or number < 0 for number in vocab.values()):
        yield f"{where}: the numbers of its tokens are no whole numbers from 0; {DOWNLOAD_AGAIN}"
        return
    unknown = [pair for pair in merges if len(pair) != 2 or not {*pair, "".join(pair)} <= vocab.keys()]
    if unknown:
        shown = excerpt(" ".join(unknown[0]), _SHOWN_CHARACTERS)
        yield f"{where}: the merge {shown} is of tokens that the vocabulary lacks; download the tokenizer again"
    largest = max(vocab.values())
    if largest >= vocab_size:
        yield (
            f"{where}: it has a token of number {largest} and the text encoder knows {vocab_size} tokens (vocab_size); "
            "download both from one model"
        )
    for name, default in _SPECIAL.items():
        token = _text(config.get(name, default))
        if token not in vocab:
            yield (
                f"{where}: the vocabulary lacks {excerpt(token, _SHOWN_CHARACTERS)}, the {name} of "
                f"{folder.name}/tokenizer_config.json; download the tokenizer again"
            )
            return


def check_t5_tokenizer(folder: Path, config: Mapping[str, object], *, vocab_size: int) -> Iterator[str]:
    """Yield a sentence, with the file's name, for each fault of the tokenizer.json of T5's tokenizer.

    Args:
        folder: Folder of the tokenizer.
        config: Contents of its tokenizer_config.json.
        vocab_size: Number of tokens that the text encoder knows.
    """
    where = f"{folder.name}/tokenizer.json"
    try:
        values = read_json_object(folder / "tokenizer.json", max_bytes=_MAX_TOKENIZER_BYTES)
    except ValueError as error:
        yield f"{where}: {error}"
        return
    model, added = values.get("model"), values.get("added_tokens")
    pieces = model.get("vocab") if isinstance(model, dict) and model.get("type") == "Unigram" else None
    if not isinstance(pieces, list) or not pieces or not isinstance(added, list):
        yield f"{where}: it is no Unigram tokenizer with model and added_tokens; download T5's tokenizer"
        return
    if len(pieces) < _T5_SPECIAL_TOKENS or not all(map(_is_piece, pieces)):
        yield f"{where}: its vocabulary is no list of tokens with numbers; {DOWNLOAD_AGAIN}"
        return
    if not all(isinstance(_content(token), str) for token in added):
        yield f"{where}: its added_tokens have no content; {DOWNLOAD_AGAIN}"
        return
    known = {piece[0] for piece in pieces}
    more = {_text(token) for token in added} - known
    known |= more
    if (count := len(pieces) + len(more)) > vocab_size:
        yield (
            f"{where}: it has {count} tokens and the text encoder knows {vocab_size} (vocab_size); download both from "
            "one model"
        )
    for name, default in _T5_SPECIAL.items():
        token = _text(config.get(name, default))
        if token not in known:
            shown = excerpt(token, _SHOWN_CHARACTERS)
            what = f"the {name} of {folder.name}/tokenizer_config.json"
            yield f"{where}: the vocabulary lacks {shown}, {what}; download the tokenizer again"
            return


def _is_piece(piece: object) -> bool:
    return isinstance(piece, list) and [*map(type, piece)] in ([str, float], [str, int])


def _read_whole(path: Path) -> tuple[dict[str, Any], Sequence[Sequence[str]]]:
    """Return the vocabulary and the merges of a tokenizer.json. Raises ValueError with a sentence."""
    where = f"{path.parent.name}/{path.name}"
    try:
        values = read_json_object(path, max_bytes=_MAX_TOKENIZER_BYTES)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    model, added = values.get("model"), values.get("added_tokens")
    if not isinstance(model, dict) or model.get("type") != "BPE" or not isinstance(added, list):
        raise ValueError(f"{where}: it is no BPE tokenizer with model and added_tokens; download CLIP's tokenizer")
    vocab, merges = model.get("vocab"), model.get("merges")
    if not isinstance(vocab, dict) or not vocab:
        raise ValueError(f"{where}: its vocabulary is empty; {DOWNLOAD_AGAIN}")
    if not isinstance(merges, list) or not merges:
        raise ValueError(f"{where}: it has no merges; {DOWNLOAD_AGAIN}")
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in merges]
    if not all(isinstance(pair, list) and all(isinstance(each, str) for each in pair) for pair in pairs):
        raise ValueError(f"{where}: its merges are no pairs of tokens; {DOWNLOAD_AGAIN}")
    tokens = {
        token["content"]: token["id"]
        for token in added
        if isinstance(token, dict) and isinstance(token.get("content"), str) and "id" in token
    }
    return vocab | tokens, pairs


def _read_pair(folder: Path) -> tuple[dict[str, Any], Sequence[Sequence[str]]]:
    """Return the vocabulary and the merges of vocab.json and merges.txt. Raises ValueError with a sentence."""
    try:
        vocab = read_json_object(folder / "vocab.json", max_bytes=_MAX_TOKENIZER_BYTES)
    except ValueError as error:
        raise ValueError(f"{folder.name}/vocab.json: {error}") from None
    if not vocab:
        raise ValueError(f"{folder.name}/vocab.json: its vocabulary is empty; {DOWNLOAD_AGAIN}")
    try:
        lines = read_model_file(folder / "merges.txt", max_bytes=_MAX_TOKENIZER_BYTES).decode().split("\n")
    except UnicodeDecodeError:
        raise ValueError(f"{folder.name}/merges.txt: it is no UTF-8 text; {DOWNLOAD_AGAIN}") from None
    except ValueError as error:
        raise ValueError(f"{folder.name}/merges.txt: {error}") from None
    merges = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    if not merges:
        raise ValueError(f"{folder.name}/merges.txt: it has no merges; {DOWNLOAD_AGAIN}")
    return vocab, merges


def _text(token: object) -> str:
    """Return the text of a special token, which may be a string or an object."""
    return str(_content(token))


def _content(token: object) -> object:
    return token.get("content") if isinstance(token, dict) else token


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
