"""Finds the weight files of a model's part that Diffusers would load, and reads their headers.

Weights have plain names (`model.safetensors`) or names of a variant (`model.fp16.safetensors`). They are in one file or
in shards that an index lists. Only indexes and headers are read.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from bottega.model_files.json_files import DOWNLOAD_AGAIN, open_model_file, read_json_object
from bottega.plain_text import excerpt
from bottega.safetensors_header import ITEM_BYTES, Header, HeaderError, TensorEntry, read_header

# An entry of an index has some hundred bytes; SDXL's UNet has 1,680 tensors.
MAX_INDEX_BYTES = 16 << 20
"""Limit of the size of an index of shards."""
_MAX_SHARDS = 256
# Files in a part's folder. A folder with more is not a part of a model.
_MAX_FILES = 4096
FLOATING_POINT = frozenset(name for name in ITEM_BYTES if "F" in name)
"""Element types of weights that are not quantized, as safetensors names them."""

_PREFERRED = ("fp16", "bf16")
_SHARD = re.compile(r"-\d{5}-of-\d{5}\b")
_PICKLED = (".bin", ".ckpt", ".pt", ".pth")
_SHOWN_CHARACTERS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsNaming:
    """A library's names of weight files, and its choice if there are several."""

    stem: str
    prefers_index: bool
    """Whether an index is preferred to a whole file."""

    def whole(self, variant: str) -> str:
        """Return the name of a whole file."""
        return f"{self.stem}{_dotted(variant)}.safetensors"

    def index(self, variant: str) -> str:
        """Return the name of an index of shards."""
        return f"{self.stem}.safetensors.index{_dotted(variant)}.json"


DIFFUSERS = WeightsNaming(stem="diffusion_pytorch_model", prefers_index=True)
TRANSFORMERS = WeightsNaming(stem="model", prefers_index=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A part's weights, as the headers of their files describe them."""

    variant: str
    files: tuple[Path, ...]
    tensors: Mapping[str, TensorEntry]

    @property
    def bytes_by_dtype(self) -> dict[str, int]:
        """Bytes of the tensors by element type."""
        total: Counter[str] = Counter()
        for tensor in self.tensors.values():
            total[tensor.dtype] += tensor.end - tensor.begin
        return dict(total)

    @property
    def parameters(self) -> int:
        """Number of elements of all floating point tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values() if tensor.dtype in FLOATING_POINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFiles:
    """The files of a part's weights."""

    variant: str
    files: tuple[Path, ...]
    """A whole file, or every shard."""
    index: str = ""
    """Name of the index of shards; empty for a whole file."""
    file_by_tensor: Mapping[str, str] = field(default_factory=dict)
    """Names of files by tensor, as the index says."""


def variants_of(folder: Path, naming: WeightsNaming) -> frozenset[str]:
    """Return the variants of a part's weights, "" for plain names.

    Raises:
        ValueError: There are no usable weights. The text is a sentence that names the folder.
    """
    names = _names(folder)
    if found := variants_in(names, naming):
        return found
    raise ValueError(nothing_to_load(folder.name, naming, names))


def variants_in(names: Iterable[str], naming: WeightsNaming) -> frozenset[str]:
    """Return the variants of the weights among files of these names, "" for plain names."""
    stem = re.escape(naming.stem)
    pattern = re.compile(rf"{stem}(?:\.(\w+))?\.safetensors|{stem}\.safetensors\.index(?:\.(\w+))?\.json")
    return frozenset(match[1] or match[2] or "" for name in names if (match := pattern.fullmatch(name)))


def choose_variant(variants: Mapping[str, frozenset[str]], wanted: str = "") -> str:
    """Return the variant in which a model is loaded: "" if all parts have plain weights.

    With another variant, parts without it are loaded from plain weights, as in Diffusers. Of several that fit all
    parts, float16 weights are preferred to bfloat16 ones, which are less precise.

    Args:
        variants: Variants of the weights, by part.
        wanted: The operator's choice; "" chooses by what is there.

    Raises:
        ValueError: No variant is usable for all parts. The text is a sentence.
    """
    there = sorted(frozenset().union(*variants.values()) - {""}, key=_preference)
    fit = [name for name in there if all({name, ""} & found for found in variants.values())]
    parts = "; ".join(f"{part} of {' and '.join(sorted(found))}" for part, found in variants.items() if "" not in found)
    if wanted:
        if wanted in fit:
            return wanted
        has = f"weights of the variant {excerpt(wanted, _SHOWN_CHARACTERS)}"
        if wanted in there:
            raise ValueError(f"some parts have neither {has} nor plain ones ({parts}); download them, too")
        others = f", but of {' and '.join(there)}" if there else ""
        raise ValueError(f"no part has {has}{others}; correct engine.model_variant")
    if all("" in found for found in variants.values()):
        return ""
    if fit:
        return fit[0]
    raise ValueError(f"no variant fits all parts ({parts}); download all parts in one variant, or all without one")


def _preference(variant: str) -> tuple[int, str]:
    return _PREFERRED.index(variant) if variant in _PREFERRED else len(_PREFERRED), variant


def weights_in(names: Iterable[str], naming: WeightsNaming, part: str) -> list[str]:
    """Return the names of a part's weight files, and of their index if there are shards.

    Args:
        names: Names of the files in the part's folder.
        part: Name of the part, for errors.

    Raises:
        ValueError: There are no usable weights. The text is a sentence.
    """
    names = sorted(names)
    variants = variants_in(names, naming)
    if not variants:
        raise ValueError(nothing_to_load(part, naming, names))
    variant = choose_variant({part: variants})
    if naming.index(variant) not in names:
        return [naming.whole(variant)]
    # A variant's name stands before the number of a shard or, from older releases of Diffusers, behind it.
    stem, dotted = re.escape(naming.stem), re.escape(_dotted(variant))
    shard = re.compile(rf"{stem}(?:{dotted}-\d+-of-\d+|-\d+-of-\d+{dotted})\.safetensors")
    return [naming.index(variant), *(name for name in names if shard.fullmatch(name))]


def find_files(
    folder: Path, naming: WeightsNaming, names: Collection[str], variant: str, root: Path | None = None
) -> FoundFiles:
    """Return the files of a part's weights of a variant, or of its plain ones where it has none of it.

    Args:
        names: Names of the files in the folder.
        root: Folder that must contain an index; None for no restriction.

    Raises:
        ValueError: There are none, or their index cannot be used. The text is a sentence that names the file.
    """
    for tried in dict.fromkeys((variant, "")):
        whole, index = naming.whole(tried), naming.index(tried)
        if index in names and (naming.prefers_index or whole not in names):
            try:
                shards = weight_map(read_json_object(folder / index, max_bytes=MAX_INDEX_BYTES, root=root))
            except ValueError as error:
                raise ValueError(f"{folder.name}/{index}: {error}") from None
            files = tuple(folder / name for name in sorted(set(shards.values())))
            return FoundFiles(variant=tried, files=files, index=index, file_by_tensor=shards)
        if whole in names:
            return FoundFiles(variant=tried, files=(folder / whole,))
    raise ValueError(nothing_to_load(folder.name, naming, names))


def read_weights(folder: Path, naming: WeightsNaming, variant: str) -> Weights:
    """Return a part's weights of a variant, or its plain ones where it has none of it.

    Raises:
        ValueError: A file cannot be used. The text is a sentence that names it.
    """
    found = find_files(folder, naming, _names(folder), variant)
    headers = {path.name: _read_header(path, named_by=found.index) for path in found.files}
    tensors = _by_name(headers.values())
    if found.index:
        _check_index(folder, found, headers)
    return Weights(variant=found.variant, files=found.files, tensors=tensors)


def _check_index(folder: Path, found: FoundFiles, headers: Mapping[str, Header]) -> None:
    """Raise ValueError unless each shard has exactly the tensors that the index says."""
    where, file_by_tensor = f"{folder.name}/{found.index}", found.file_by_tensor
    placed = {tensor.name: name for name, header in headers.items() for tensor in header.tensors}
    if len(placed) < sum(len(header.tensors) for header in headers.values()):
        raise ValueError(f"{where}: two of its files have tensors of one name; download the part {folder.name} again")
    for tensor in sorted(file_by_tensor.keys() ^ placed.keys()) or _misplaced(file_by_tensor, placed):
        named, actual = file_by_tensor.get(tensor, "no file"), placed.get(tensor, "none of its files")
        raise ValueError(
            f"{where}: it names {named} for the tensor {excerpt(tensor, _SHOWN_CHARACTERS)}, which is in {actual}; "
            f"download the part {folder.name} again"
        )


def _misplaced(file_by_tensor: Mapping[str, str], placed: Mapping[str, str]) -> list[str]:
    return [tensor for tensor, name in file_by_tensor.items() if placed[tensor] != name]


def weight_map(index: Mapping[str, object]) -> dict[str, str]:
    """Return the file of each tensor from an index. Raises ValueError if Diffusers would not accept the index."""
    files = index.get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ValueError(f"weight_map is no object of tensors; {DOWNLOAD_AGAIN}")
    if not isinstance(index.get("metadata"), dict):
        raise ValueError(f"metadata is no object; {DOWNLOAD_AGAIN}")
    for name in files.values():
        if not isinstance(name, str) or not name.endswith(".safetensors"):
            raise ValueError(f"it names {excerpt(str(name), _SHOWN_CHARACTERS)}, no safetensors file; {DOWNLOAD_AGAIN}")
        if "/" in name or "\0" in name:
            raise ValueError(
                f"it names {excerpt(name, _SHOWN_CHARACTERS)}, which leads out of its folder; shards lie beside "
                "their index"
            )
    if len(set(files.values())) > _MAX_SHARDS:
        raise ValueError(f"it names over {_MAX_SHARDS} files; save the model in fewer shards")
    return files


def _read_header(path: Path, *, named_by: str = "") -> Header:
    where = f"{path.parent.name}/{path.name}"
    try:
        with open_model_file(path) as file:
            header = read_header(file)
    except HeaderError as error:
        raise ValueError(f"{where}: it is damaged or cut off ({error}); {DOWNLOAD_AGAIN}") from None
    except OSError as error:
        raise ValueError(f"{where}: it cannot be read ({error.strerror}); {DOWNLOAD_AGAIN}") from None
    except ValueError as error:
        named = f" (named by {named_by})" if named_by else ""
        raise ValueError(f"{where}{named}: {error}") from None
    return header


def _by_name(headers: Iterable[Header]) -> dict[str, TensorEntry]:
    return {tensor.name: tensor for header in headers for tensor in header.tensors}


def _names(folder: Path) -> frozenset[str]:
    """Return the names of the files in a part's folder. Raises ValueError with a sentence."""
    try:
        with os.scandir(folder) as entries:
            names = frozenset(entry.name for entry in islice(entries, _MAX_FILES + 1))
    except FileNotFoundError:
        raise ValueError(f"the folder {folder.name} is missing; download the model again, with all parts") from None
    except NotADirectoryError:
        raise ValueError(f"{folder.name} is a file and should be a folder; download the model again") from None
    except OSError as error:
        raise ValueError(
            f"the folder {folder.name} cannot be read ({error.strerror}); change its permissions or its owner"
        ) from None
    if len(names) > _MAX_FILES:
        raise ValueError(f"the folder {folder.name} has over {_MAX_FILES} files; give the folder of a model alone")
    return names


def nothing_to_load(part: str, naming: WeightsNaming, names: Iterable[str]) -> str:
    """Return a sentence on why a folder with files of these names has no usable weights."""
    wanted = naming.whole("")
    if pickled := sorted(name for name in names if name.endswith(_PICKLED)):
        return (
            f"{part} has only pickled weights ({excerpt(pickled[0], _SHOWN_CHARACTERS)}), which are never opened "
            f"because they may run code; download {part}/{wanted}, or save the model again with "
            "safe_serialization=True"
        )
    others = sorted(name for name in names if name.endswith(".safetensors"))
    if any(_SHARD.search(name) for name in others):
        return f"{part} has shards and no {naming.index('')} that names them; download the part again"
    if others:
        found = excerpt(others[0], _SHOWN_CHARACTERS)
        return f"{part} has {found} and no {wanted}; download the part again, or rename the file"
    return f"{part} has no {wanted}; download the model again, with all of its files"


def _dotted(variant: str) -> str:
    return f".{variant}" if variant else ""
