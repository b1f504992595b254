"""Converts a file of textual inversion to canonical modules: the vectors of one token, for each text encoder.

Diffusers     one tensor, named as the token
A1111         one tensor, emb_params or string_to_param.*
SDXL          clip_l and clip_g, or text_encoders_0 and text_encoders_1 as Diffusers' scripts name them
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bottega.addons.loras.wire.canonical import (
    TOKEN_RULE,
    ModuleWeights,
    TensorData,
    headers_of_loras,
    is_token,
    normalised_token,
)
from bottega.addons.loras.wire.module_parts import MAX_VECTORS, TOKEN_EMBEDDING, VECTORS
from bottega.errors import BadLora, ConfigError
from bottega.loras.importing.arrays import largest, read_weights
from bottega.loras.importing.base import Base
from bottega.loras.importing.converting import ConvertedLora, LoraSourceFile, of_another_family
from bottega.loras.importing.naming import FAMILY_OF_WIDTH, Format, parse_name
from bottega.model_files.family_names import SDXL, TITLES
from bottega.model_files.json_files import read_json_object
from bottega.plain_text import excerpt
from bottega.safetensors_header import Header, TensorEntry, read_header
from bottega.storage.folders import open_below

_FIRST, _SECOND = "text_encoder", "text_encoder_2"
_ENCODERS = {"clip_l": _FIRST, "clip_g": _SECOND, "text_encoders_0": _FIRST, "text_encoders_1": _SECOND}
# Names of A1111's that are not the token.
_UNNAMED = frozenset({"emb_params", "string_to_param", "string_to_param.*", "*"})
# Workers may run text encoders in float16.
_MAX_F16 = 65504.0
# CLIP's tokenizer.json has some 4 MB.
_MAX_VOCABULARY_BYTES = 64 << 20
_LAYER = re.compile(r"\.(weight|bias|alpha)$")


def convert_embedding(
    sources: Sequence[LoraSourceFile], *, base: Base, folder: Path, family: str, token: str, name: str
) -> ConvertedLora | None:
    """Convert the embedding in a file; return None if it is no file of an embedding.

    Args:
        sources: The files, of which an embedding has one.
        base: The base model.
        folder: Its folder.
        family: Display name of its family; "" if unknown.
        token: The token that the caller wants; "" for that of the file, or else the name.
        name: Name of the embedding in the store.

    Raises:
        BadLora: The embedding is refused; the message says why.
        OSError: A file cannot be read.
    """
    if len(sources) != 1 or sources[0].config or sources[0].component:
        return None
    with open_below(sources[0].path, sources[0].root) as file:
        with headers_of_loras():
            header = read_header(file)
        found = _vectors(header)
        if not found:
            return None
        if not base.token_widths:
            reader = family or "the base model"
            raise BadLora(
                f"it is an embedding (textual inversion), and none are served with {reader}: use a LoRA instead"
            )
        _check_encoders(found, base, family)
        own = "" if len(found) > 1 or header.tensors[0].name in _UNNAMED | _ENCODERS.keys() else header.tensors[0].name
        chosen = normalised_token(token or own or name.partition("@")[0].rpartition("/")[2])
        _check_token(chosen, folder)
        modules = []
        for component, entry in found.items():
            rows = read_weights(file, header, entry)
            shape = (1, *rows.shape) if len(rows.shape) == 1 else rows.shape
            vectors = TensorData(dtype=rows.dtype, shape=shape, data=rows.data)
            _check_magnitude(entry, vectors)
            parts = {VECTORS: vectors}
            modules.append(ModuleWeights(component=component, path=TOKEN_EMBEDDING, scale=1.0, parts=parts))
    return ConvertedLora(modules=tuple(modules), format=Format.EMBEDDING, trigger_phrase=chosen, note="", token=chosen)


def _vectors(header: Header) -> Mapping[str, TensorEntry]:
    """Return the tensors of vectors by text encoder; {} if it is no file of an embedding."""
    names = [entry.name for entry in header.tensors]
    if names and all(name in _ENCODERS for name in names):
        return {_ENCODERS[entry.name]: entry for entry in header.tensors}
    if len(names) == 1 and parse_name(names[0]) is None and not _LAYER.search(names[0]):
        return {_FIRST: header.tensors[0]}
    return {}


def _check_encoders(found: Mapping[str, TensorEntry], base: Base, family: str) -> None:
    widths = {component: _width(entry) for component, entry in found.items()}
    shaped = TITLES[SDXL] if _SECOND in found else FAMILY_OF_WIDTH.get(widths[_FIRST], "")
    if widths.keys() != base.token_widths.keys():
        has, reads = (", ".join(sorted(names)) for names in (widths, base.token_widths))
        reason = f"it has vectors for {has}, and the model reads {reads}"
        raise of_another_family(reason, shaped, family, what="embedding")
    for component, width in widths.items():
        if width != base.token_widths[component]:
            read = base.token_widths[component]
            reason = f"it has vectors of {width} values for {component}, and the model reads {read}"
            raise of_another_family(reason, shaped, family, what="embedding")


def _width(entry: TensorEntry) -> int:
    if len(entry.shape) not in {1, 2} or 0 in entry.shape or (len(entry.shape) == 2 and entry.shape[0] > MAX_VECTORS):
        raise BadLora(
            f"{excerpt(entry.name, 80)} has the shape {list(entry.shape)}; an embedding has 1 to {MAX_VECTORS} vectors"
        )
    return entry.shape[-1]


def _check_magnitude(entry: TensorEntry, vectors: TensorData) -> None:
    if (found := largest(vectors)) > _MAX_F16:
        raise BadLora(f"{excerpt(entry.name, 80)} has elements up to {found:.3g}; float16 holds at most {_MAX_F16:g}")


def _check_token(token: str, folder: Path) -> None:
    if not is_token(token):
        raise BadLora(f"the token {excerpt(token, 80)!r} {TOKEN_RULE}: give another one as its trigger word")
    if any(token in words for words in _vocabularies(folder)):
        raise BadLora(f"the token {token} is in the vocabulary of the base model: give another one as its trigger word")


def _vocabularies(folder: Path) -> Iterator[Mapping[str, object]]:
    """Yield the words of the base model's tokenizers."""
    for tokenizer in sorted(folder.glob("tokenizer*")):
        for name in ("vocab.json", "added_tokens.json", "tokenizer.json"):
            if not (tokenizer / name).is_file():
                continue
            try:
                words = read_json_object(tokenizer / name, max_bytes=_MAX_VOCABULARY_BYTES)
            except ValueError as error:
                raise ConfigError(f"base model {folder} cannot be used: {tokenizer.name}/{name}: {error}") from None
            if name != "tokenizer.json":
                yield words
                continue
            model, added = words.get("model"), words.get("added_tokens")
            if isinstance(model, dict) and isinstance(model.get("vocab"), dict):
                yield model["vocab"]
            if isinstance(added, list):
                yield {str(one.get("content")): one for one in added if isinstance(one, dict)}
