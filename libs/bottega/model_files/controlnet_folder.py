"""Reads a ControlNet's folder in Diffusers' layout, without torch: its configuration, and the headers of its weights.

The files are untrusted, and may change at any time. If a root is
given, no file outside it is read, even through links.
"""

from __future__ import annotations

import errno
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from bottega import rules
from bottega.errors import BottegaError, ControlNetUnusable, InvalidRequest
from bottega.model_files.control_layout import ControlLayout, controlnet_layout
from bottega.model_files.controlnet_config import (
    FILE,
    MAX_CONFIG_BYTES,
    AnyNetworkConfig,
    FluxNetworkConfig,
    Sd3NetworkConfig,
    not_served,
    read_fields,
    read_network_config,
)
from bottega.model_files.digest import controlnet_digest
from bottega.model_files.json_files import DOWNLOAD_AGAIN, is_lfs_pointer
from bottega.model_files.tensor_check import controlnet_tensors
from bottega.model_files.transformer_rules import flux_controlnet_tensors, sd3_controlnet_tensors
from bottega.model_files.weights import (
    DIFFUSERS,
    FLOATING_POINT,
    choose_variant,
    find_files,
    nothing_to_load,
    variants_in,
)
from bottega.plain_text import excerpt
from bottega.safetensors_header import LENGTH_BYTES, Header, HeaderError, header_bytes, read_header
from bottega.storage.folders import listed, open_below

# Size of a file's header, all of which becomes objects. Headers of SDXL's ControlNets have 100 KB.
_MAX_HEADER_BYTES = 2 << 20
_MAX_SHARDS = 64
_SHOWN_CHARACTERS = 60
# Differences that an error names.
_LISTED = 3
# Enough to distinguish a Git LFS pointer from a header's length.
_BEGINNING_BYTES = 64
_POINTER = "{} is a Git LFS pointer in place of the file; run `git lfs pull` in its folder"
SINGLE_FILE = "it is a single file; `bottega models import FILE` makes a folder of a .safetensors file"
"""Reason to refuse a file instead of a ControlNet's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFile:
    """An open weight file with its checked header."""

    file: BufferedReader
    header: Header


def check_controlnet(name: str, folder: Path, base: ControlLayout | None, *, root: Path | None = None) -> str:
    """Return a sentence on why a ControlNet cannot be used; empty if its configuration and headers are valid.

    Args:
        name: Name of the ControlNet, for the sentence.
        base: Layout of the model that it must fit; None if it is unknown.
        root: Folder that must contain all files.
    """
    try:
        with naming(name, "used"):
            config = read_checked_config(name, folder, base=base, root=root)
            with opened_weights(folder, root) as files:
                check_same(dict(_TENSORS.get(type(config), controlnet_tensors)(config.fields)), files)
        return ""
    except BottegaError as error:
        return error.message


def read_checked_config(
    name: str, folder: Path, *, base: ControlLayout | None = None, root: Path | None = None
) -> AnyNetworkConfig:
    """Return a ControlNet's configuration.

    Raises:
        InvalidRequest: Fields are out of bounds; the error names each.
        ControlNetUnusable: Its kind is not served, or it does not fit the base model.
    """
    text = _config_text(folder, root)
    try:
        if reasons := list(not_served(read_fields(text))):
            raise ControlNetUnusable(f"ControlNet {name} cannot be served: {'; '.join(reasons)}")
        config = read_network_config(text)
    except InvalidRequest as error:
        message = f"ControlNet {name} cannot be used: {error.message}"
        raise InvalidRequest(message, violations=error.violations) from None
    if base is not None and (misfits := list(controlnet_layout(config).misfits(base))):
        raise ControlNetUnusable(f"ControlNet {name} does not fit the model: {'; '.join(misfits)}")
    return config


@contextmanager
def opened_weights(folder: Path, root: Path | None) -> Iterator[Sequence[WeightsFile]]:
    """Open the weights of a ControlNet for the block: a single file or every shard.

    Raises:
        OSError: A file cannot be read, or is outside the root.
        ValueError: A file is invalid.
    """
    with ExitStack() as stack:
        yield [_opened(path, stack.enter_context(open_below(path, root))) for path in _weights(folder, root)]


@contextmanager
def naming(name: str, what: str) -> Iterator[None]:
    """Turn errors about a ControlNet's files in the block into ControlNetUnusable with its name."""
    try:
        yield
    except OSError as error:
        raise ControlNetUnusable(f"ControlNet {name} cannot be {what}: {_of_file(error)}") from error
    except (ValueError, ArithmeticError, TypeError) as error:
        raise ControlNetUnusable(f"ControlNet {name} cannot be {what}: {error}") from error


def check_same(wanted: Mapping[str, tuple[int, ...]], files: Sequence[WeightsFile]) -> None:
    """Raise ValueError if the files do not have exactly the tensors of a network.

    Args:
        wanted: Shapes of the network's tensors by name.
    """
    entries = [entry for weights in files for entry in weights.header.tensors]
    found = {entry.name: entry.shape for entry in entries}
    if len(found) < len(entries):
        raise ValueError("two of its weight files have tensors of one name; download the ControlNet again")
    if wrong := [*_misshapen(wanted, found)]:
        more = f" and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
        raise ValueError(
            f"its weights are not those of its config.json: {'; '.join(wrong[:_LISTED])}{more}; "
            "download both from one ControlNet"
        )


def _misshapen(wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    for name in sorted(wanted.keys() - found.keys()):
        yield f"{name} is not there"
    for name, shape in found.items():
        if name not in wanted:
            yield f"nothing takes {excerpt(name, _SHOWN_CHARACTERS)}"
        elif shape != wanted[name]:
            yield f"{name} is {list(shape)} and should be {list(wanted[name])}"


def _config_text(folder: Path, root: Path | None) -> bytes:
    try:
        with open_below(folder / FILE, root) as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
    except NotADirectoryError:
        raise ValueError(SINGLE_FILE) from None
    if is_lfs_pointer(text):
        raise ValueError(_POINTER.format(FILE))
    return text


def _weights(folder: Path, root: Path | None) -> list[Path]:
    """Return the files that Diffusers loads: those of an index if there is one, else the whole file."""
    names = {path.name for path in listed(folder, "", most=rules.MAX_CONTROLNET_FILES, deep=False)}
    variants = variants_in(names, DIFFUSERS)
    if not variants:
        raise ValueError(nothing_to_load(folder.name, DIFFUSERS, names))
    found = find_files(folder, DIFFUSERS, names, choose_variant({folder.name: variants}), root)
    if len(found.files) > _MAX_SHARDS:
        raise ValueError(
            f"its weights are in {len(found.files)} files; save the ControlNet in at most {_MAX_SHARDS} shards"
        )
    return list(found.files)


def _opened(path: Path, file: BufferedReader) -> WeightsFile:
    beginning = file.read(_BEGINNING_BYTES)
    if is_lfs_pointer(beginning):
        raise ValueError(_POINTER.format(path.name))
    try:
        if (size_bytes := header_bytes(beginning[:LENGTH_BYTES])) > _MAX_HEADER_BYTES:
            raise HeaderError(f"its header has {size_bytes} bytes; {_MAX_HEADER_BYTES} may be read")
        header = read_header(file)
    except HeaderError as error:
        raise ValueError(f"{path.name}: it is damaged or cut off ({error}); {DOWNLOAD_AGAIN}") from None
    for entry in header.tensors:
        if entry.dtype not in FLOATING_POINT:
            raise ValueError(
                f"{path.name}: the tensor {entry.name[:80]} has elements of {entry.dtype}; quantized weights are not "
                "served, download float32, float16 or bfloat16 ones"
            )
    return WeightsFile(file=file, header=header)


def _of_file(error: OSError) -> str:
    """Return the text of an error without the folder, which only the operator may know. The log has it."""
    where = f"{os.path.basename(error.filename)}: " if isinstance(error.filename, str) else ""  # noqa: PTH119
    if error.errno == errno.ENOENT:
        return f"{where}there is no such file; download the ControlNet again, with all of its files"
    return f"{where}{error.strerror or 'the disk fails'}"


_TENSORS = {Sd3NetworkConfig: sd3_controlnet_tensors, FluxNetworkConfig: flux_controlnet_tensors}
# Bytes of an element, by the configured name of its type.
_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlNetFacts:
    """Facts about a ControlNet."""

    digest: str
    """Hash of its files, in hexadecimal."""
    base: str
    """Name of the layout that a fitting model must have; see ControlLayout."""
    size_bytes: int
    """Bytes of its loaded weights."""
    modes: int = 0
    """Number of its control modes; 0 if it is not a union."""


def read_controlnet_facts(name: str, folder: Path, *, dtype: str) -> ControlNetFacts:
    """Read an operator's ControlNet: its configuration, its headers, and all files for their hash.

    Args:
        name: Name of the ControlNet, for errors.
        folder: Folder in Diffusers' layout.
        dtype: Element type in which it is loaded; "auto" is that of its files.

    Raises:
        InvalidRequest: Its configuration has values out of bounds.
        ControlNetUnusable: It cannot be served.
    """
    with naming(name, "used"):
        config = read_checked_config(name, folder)
        with opened_weights(folder, None) as files:
            elements = sum(math.prod(entry.shape) for weights in files for entry in weights.header.tensors)
            size_bytes = elements * (_ITEM_BYTES.get(dtype) or _item_bytes(files))
    with naming(name, "read"):
        digest = controlnet_digest(folder)
    return ControlNetFacts(
        digest=digest, base=controlnet_layout(config).base, size_bytes=size_bytes, modes=config.modes
    )


def _item_bytes(files: Sequence[WeightsFile]) -> int:
    """Return the bytes of an element in the type of most tensors."""
    common = Counter(entry.dtype for weights in files for entry in weights.header.tensors).most_common(1)
    return 2 if common and common[0][0] in ("F16", "BF16") else 4
