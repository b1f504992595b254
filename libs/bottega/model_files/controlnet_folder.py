"""A ControlNet's folder in Diffusers' layout, without torch: its configuration and the headers of its weights.

A stranger may have written the files and may change them at any time. Where there is a root, no file is read that lies
outside of it, links followed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from bottega import rules
from bottega.errors import BottegaError, ControlNetUnusable, InvalidRequest
from bottega.model_files.controlnet_config import (
    FILE,
    MAX_CONFIG_BYTES,
    NetworkConfig,
    not_served,
    read_fields,
    read_network_config,
)
from bottega.model_files.controlnet_layout import ControlLayout, controlnet_layout
from bottega.model_files.json_files import DOWNLOAD_AGAIN, is_lfs_pointer, parse_json_object
from bottega.model_files.tensor_check import controlnet_tensors
from bottega.model_files.weights import (
    DIFFUSERS,
    FLOATING_POINT,
    MAX_INDEX_BYTES,
    choose_variant,
    nothing_to_load,
    variants_in,
    weight_map,
)
from bottega.plain_text import excerpt
from bottega.safetensors_header import LENGTH_BYTES, Header, HeaderError, header_bytes, read_header
from bottega.storage.contained_paths import listed, open_below

SUFFIX = ".safetensors"

# Of each file; those of SDXL's have 100 KB, all of which become objects.
_MAX_HEADER_BYTES = 2 << 20
_MAX_SHARDS = 64
_SHOWN_CHARACTERS = 60
# Differences that a sentence names.
_LISTED = 3
# Enough to tell a pointer of Git LFS from a header's length.
_BEGINNING_BYTES = 64
_POINTER = "{} is a Git LFS pointer in place of the file; run `git lfs pull` in its folder"
SINGLE_FILE = (
    "it is a single file; give a folder with config.json and diffusion_pytorch_model.safetensors, as Diffusers' "
    "ControlNetModel.save_pretrained writes it"
)
"""Why a file in place of a ControlNet's folder is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFile:
    """An open file of weights and its header, which has been checked."""

    file: BufferedReader
    header: Header


def check_controlnet(name: str, folder: Path, base: ControlLayout | None, *, root: Path | None = None) -> str:
    """Return why a ControlNet cannot be used, as one sentence; empty where its configuration and headers are good.

    Args:
        name: Its name, for the sentence.
        folder: Its folder.
        base: Layout of the model that it must fit; None where that is not known.
        root: Folder that all files must lie below.
    """
    try:
        with naming(name, "used"):
            config = read_checked_config(name, folder, base=base, root=root)
            with opened_weights(folder, root) as files:
                check_same(dict(controlnet_tensors(config.fields)), files)
        return ""
    except BottegaError as error:
        return error.message


def read_checked_config(
    name: str, folder: Path, *, base: ControlLayout | None = None, root: Path | None = None
) -> NetworkConfig:
    """Return a ControlNet's configuration.

    Raises:
        InvalidRequest: Names each field that is out of its bounds.
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
    """Open its weights for the block: one file or every shard.

    Raises:
        OSError: A file cannot be read, or lies outside of the root.
        ValueError: With what is wrong with a file.
    """
    with ExitStack() as stack:
        yield [_opened(path, stack.enter_context(open_below(path, root))) for path in _weights(folder, root)]


@contextmanager
def naming(name: str, what: str) -> Iterator[None]:
    """Raise ControlNetUnusable with the ControlNet's name for what is wrong with its files in the block."""
    try:
        yield
    except OSError as error:
        raise ControlNetUnusable(f"ControlNet {name} cannot be {what}: {_of_file(error)}") from error
    except (ValueError, ArithmeticError, TypeError) as error:
        raise ControlNetUnusable(f"ControlNet {name} cannot be {what}: {error}") from error


def check_same(wanted: Mapping[str, tuple[int, ...]], files: Sequence[WeightsFile]) -> None:
    """Raise ValueError where the files have other tensors than a network, or tensors of other shapes.

    Args:
        wanted: The network's shapes by name.
        files: Of its weights.
    """
    entries = [entry for weights in files for entry in weights.header.tensors]
    found = {entry.name: entry.shape for entry in entries}
    if len(found) < len(entries):
        raise ValueError("two of its files have a tensor of the same name")
    if wrong := [*_misshapen(wanted, found)]:
        more = f" and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
        raise ValueError(f"its weights are not those of its config.json: {'; '.join(wrong[:_LISTED])}{more}")


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
    """Return the files that Diffusers loads: those of an index where there is one, else a whole one."""
    names = {path.name for path in listed(folder, "", most=rules.MAX_CONTROLNET_FILES, deep=False)}
    variants = variants_in(names, DIFFUSERS)
    if not variants:
        raise ValueError(nothing_to_load(folder.name, DIFFUSERS, names))
    variant = choose_variant({folder.name: variants})
    if (index := DIFFUSERS.index(variant)) not in names:
        return [folder / DIFFUSERS.whole(variant)]
    shards = sorted(set(_indexed(folder / index, root).values()))
    if len(shards) > _MAX_SHARDS:
        raise ValueError(f"its weights are in {len(shards)} parts; at most {_MAX_SHARDS} are accepted")
    return [folder / shard for shard in shards]


def _indexed(index: Path, root: Path | None) -> dict[str, str]:
    with open_below(index, root) as file:
        content = file.read(MAX_INDEX_BYTES + 1)
    if len(content) > MAX_INDEX_BYTES:
        raise ValueError(f"{index.name} has over {MAX_INDEX_BYTES} bytes")
    try:
        return weight_map(parse_json_object(content))
    except ValueError as error:
        raise ValueError(f"{index.name}: {error}") from None


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
            raise ValueError(f"{path.name}: {entry.name[:80]} has elements of {entry.dtype}, no floating point numbers")
    return WeightsFile(file=file, header=header)


def _of_file(error: OSError) -> str:
    """Return the error without the folder, which only its operator may know; the server's log names it."""
    where = f"{os.path.basename(error.filename)}: " if isinstance(error.filename, str) else ""  # noqa: PTH119
    return f"{where}{error.strerror or 'the disk fails'}"
