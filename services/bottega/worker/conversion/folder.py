"""Makes a folder from a single file, all of it or nothing, and recognises one that was made before.

The folder is written under a hidden name beside its place, and renamed when it is complete. `imported.record` in it
says from which file it was made.
"""

from __future__ import annotations

import contextlib
import glob
import gzip
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bottega.errors import ConfigError
from bottega.model_files.digest import file_digest
from bottega.model_files.importing import remove_abandoned
from bottega.model_files.json_files import is_there, read_json_object
from bottega.model_files.single_file import SingleFile, read_single_file
from bottega.model_files.single_file_check import check_header, with_parts
from bottega.model_files.single_file_folder import index_of, scheduler_config, tokenizer_configs
from bottega.model_files.single_file_kind import FileKind
from bottega.process.memory import available_bytes
from bottega.storage import folders
from bottega.storage.folders import ProcessLock

# The merges of OpenAI's CLIP that its vocabulary of 49,408 tokens uses, under the licence in CLIP_LICENSE.txt.
_MERGES = Path(__file__).with_name("clip_merges.txt.gz")
_SPECIAL = ("<|startoftext|>", "<|endoftext|>")
_END_OF_WORD = "</w>"
# Bytes that stand for themselves; the others are moved behind the first 256 characters, because BPE splits at spaces.
_PRINTABLE = (*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1))
# No JSON or text file, because those count for the hashes of models, and its times differ from machine to machine.
RECORD_FILE = "imported.record"

_TRANSFORMERS = ("text_encoder", "text_encoder_2")
# Room for everything in a folder that is no weight: tokenizers above all.
_OTHER_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """The result of a conversion."""

    folder: Path
    source: SingleFile
    is_new: bool
    """Whether the folder was made now; otherwise an earlier conversion of the same file made it."""


def convert_file(
    path: Path,
    folder: Path,
    family: str = "",
    prediction_type: str = "",
    vae: Path | None = None,
    *,
    parts: Path | None = None,
    on_part: Callable[[str, int], None] = lambda part, size_bytes: None,
) -> Conversion:
    """Convert a single file to a folder in Diffusers' layout.

    Args:
        family: See `read_single_file`.
        prediction_type: See `read_single_file`.
        vae: See `read_single_file`.
        parts: Folder of a model that has the parts that the file lacks. The new folder links to them.
        on_part: Called with the name and the bytes of each part before it is converted.

    Raises:
        ConfigError: The file cannot be converted, or the folder is something else. The text names the path.
    """
    try:
        source = read_single_file(path, family, prediction_type, vae)
        source = source if parts is None else with_parts(source, parts)
        configs = check_header(source)
        if is_there(folder):
            _check_made_of(folder, source)
            return Conversion(folder=folder, source=source, is_new=False)
        # It imports torch and Diffusers, which takes seconds: only for a file that its header does not rule out.
        from bottega.worker.conversion.tensors import check_part

        for part, config in configs.items():
            check_part(source, part, config)
        _check_memory(source)
        with _staged(folder, source.size_bytes + _OTHER_BYTES) as staging:
            _write(source, configs, staging, on_part)
            is_new = _put_in_place(staging, folder, source)
        folders.sync(folder.parent)
    except ValueError as error:
        raise ConfigError(f"{path} cannot be converted: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be converted: {error.filename or folder}: {error.strerror}") from None
    return Conversion(folder=folder, source=source, is_new=is_new)


def _check_memory(source: SingleFile) -> None:
    """Raise ValueError if a part does not fit into memory: the kernel would end the process without a sentence."""
    sizes = {part: sum(entry.end - entry.begin for entry in entries) for part, entries in source.parts.items()}
    part = max(sizes, key=lambda name: sizes[name])
    left_bytes = available_bytes()
    if left_bytes is not None and sizes[part] > left_bytes:
        raise ValueError(
            f"its {part} has {sizes[part] >> 20} MiB, which are in memory at once, and {left_bytes >> 20} MiB are free"
        )


def _write(
    source: SingleFile,
    configs: Mapping[str, dict[str, Any]],
    folder: Path,
    on_part: Callable[[str, int], None],
) -> None:
    from bottega.worker.conversion.tensors import convert_part

    whole = source.kind is FileKind.MODEL
    # The VAE comes first: it is the smallest part, and the one that is most often damaged.
    for part in sorted(configs, key=lambda part: (part != "vae", part)):
        on_part(part, sum(entry.end - entry.begin for entry in source.parts[part]))
        place = folder / part if whole else folder
        place.mkdir(exist_ok=True)
        _write_json(place / "config.json", configs[part])
        name = "model" if part in _TRANSFORMERS else "diffusion_pytorch_model"
        convert_part(source, part, configs[part], place / f"{name}.safetensors")
    if whole:
        _write_rest(source, configs, folder)
    _write_json(folder / RECORD_FILE, _record(source, file_digest(source.path)))
    for path in sorted(folder.rglob("*")):
        folders.sync(path) if path.is_dir() else _sync_file(path)
    folders.sync(folder)


def _write_rest(source: SingleFile, configs: Mapping[str, dict[str, Any]], folder: Path) -> None:
    """Write what a whole model has beside its weights."""
    for part in source.tokenizers:
        (folder / part).mkdir()
        write_vocabulary(folder / part)
        for name, values in tokenizer_configs(source.family, part).items():
            _write_json(folder / part / name, values)
    for part, place in source.others.items():
        (folder / part).symlink_to(place.resolve(), target_is_directory=True)
    (folder / "scheduler").mkdir()
    _write_json(folder / "scheduler" / "scheduler_config.json", scheduler_config(source))
    _write_json(folder / "model_index.json", index_of(source, configs))


def _put_in_place(staging: Path, folder: Path, source: SingleFile) -> bool:
    """Rename the complete staging folder. Return False if another process has imported the file meanwhile."""
    try:
        staging.rename(folder)  # fails if there are files in the folder
    except OSError:
        if not is_there(folder):
            raise
        _check_made_of(folder, source)
        return False
    return True


def _check_made_of(folder: Path, source: SingleFile) -> None:
    """Raise ValueError unless a folder is the complete conversion of a file."""
    try:
        record = read_json_object(folder / RECORD_FILE)
    except ValueError:
        raise ValueError(f"{folder} is there already, and no import made it; name another folder with --to") from None
    wanted = _record(source, "")
    same = all(record.get(key) == value for key, value in wanted.items() if key not in {"sha256", "modified_ns"})
    # A file of the same time was not changed; of a copy the content decides.
    if not same or (
        record.get("modified_ns") != wanted["modified_ns"] and record.get("sha256") != file_digest(source.path)
    ):
        raise ValueError(
            f"{folder} was imported from another file or as another family; delete it, or name another folder with --to"
        )


def _record(source: SingleFile, digest: str) -> dict[str, object]:
    status = source.path.stat()
    return {
        "family": source.family,
        "prediction_type": source.prediction_type,
        "parts": {part: str(place.resolve()) for part, place in source.others.items()} or None,
        "vae_sha256": None if source.vae is None else file_digest(source.vae),
        "size_bytes": status.st_size,
        "modified_ns": status.st_mtime_ns,
        "sha256": digest,
    }


@contextlib.contextmanager
def _staged(folder: Path, size_bytes: int) -> Iterator[Path]:
    """Make a hidden folder beside a place for the block, and remove it afterwards if it is still there.

    The folder is locked. Those of imports that were killed are not, and are removed.

    Raises:
        ValueError: There is no room.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{folder.name}.importing-"
    for left in folder.parent.glob(f"{glob.escape(prefix)}*"):
        remove_abandoned(left)
    free_bytes = shutil.disk_usage(folder.parent).free
    if free_bytes < size_bytes:
        raise ValueError(
            f"it needs {size_bytes >> 20} MiB in {folder.parent}, and {free_bytes >> 20} MiB are free; delete files "
            "there, or name a folder on another disk with --to"
        )
    staging = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    lock = ProcessLock(staging)
    try:
        lock.acquire()
        yield staging
    finally:
        if is_there(staging):
            shutil.rmtree(staging)
        lock.release()


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_vocabulary(folder: Path) -> None:
    """Write vocab.json and merges.txt of CLIP's tokenizer, which all families share, into an existing folder."""
    merges = gzip.decompress(_MERGES.read_bytes()).decode()
    letters = [chr(byte) for byte in _PRINTABLE] + [chr(256 + number) for number in range(256 - len(_PRINTABLE))]
    words = [*letters, *(letter + _END_OF_WORD for letter in letters)]
    words += [line.replace(" ", "") for line in merges.splitlines()]
    vocabulary = {word: number for number, word in enumerate([*words, *_SPECIAL])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}", encoding="utf-8")
