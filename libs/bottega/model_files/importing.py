"""Runs the conversion of a single file to a folder, in a process of its own that the worker's package has. No torch."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bottega import kinds
from bottega.errors import ConfigError
from bottega.manifest import missing_packages, read_services
from bottega.model_files.digest import file_digest
from bottega.model_files.family_names import SD3
from bottega.model_files.json_files import is_there
from bottega.model_files.single_file_check import refusal_of, vae_refusal
from bottega.model_files.single_file_transformer import WITHOUT_T5
from bottega.state_folder import make_private
from bottega.storage.folders import ProcessLock

CONVERSION_S = 1800.0
"""Limit of a conversion. SDXL takes about a minute on a slow disk."""
_FOLDER = "imported"
_HASH_LETTERS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportResult:
    """The result of a conversion."""

    folder: Path
    is_new: bool
    """Whether the folder was made now; otherwise an earlier import of the same file made it."""
    kind: str
    """Such as `a whole model`; see `FileKind`."""
    family: str
    title: str
    """Display name of the family."""
    prediction_type: str
    prediction_source: str
    """What says so; see `SingleFile`."""
    prediction_is_guess: bool

    @property
    def summary(self) -> str:
        """Sentences on a whole model: what it predicts, how to correct that if it is a guess, and what it lacks."""
        origin = "a guess:" if self.prediction_is_guess else "from"
        prediction = f"Prediction type: {self.prediction_type}, {origin} {self.prediction_source}."
        is_without_t5 = self.family == SD3 and not is_there(self.folder / "text_encoder_3")
        return f"{prediction} {WITHOUT_T5}" if is_without_t5 else prediction


OnPart = Callable[[str, int], None]


async def import_file(
    file: Path,
    folder: Path,
    family: str = "",
    prediction_type: str = "",
    vae: Path | None = None,
    *,
    parts: Path | None = None,
    on_part: OnPart = lambda part, size_bytes: None,
) -> ImportResult:
    """Convert a single file to a folder in Diffusers' layout, unless an earlier call has done it.

    Args:
        family: The operator's word for the family; "" asks the tensors alone.
        prediction_type: The operator's word for what the UNet predicts; "" asks the file alone.
        vae: File of a VAE that a whole model gets in place of its own.
        parts: Folder of a model that has the parts that a whole model lacks.
        on_part: Called with the name and the bytes of each part before it is converted.

    Raises:
        ConfigError: It cannot be converted. The text is a sentence.
    """
    worker = next(service for service in read_services() if service.kind == kinds.WORKER)
    if missing := missing_packages(worker):
        raise ConfigError(f"importing needs {', '.join(missing)}, not installed here: pip install '{worker.install}'")
    arguments = [str(file), str(folder), family, prediction_type, str(vae or ""), str(parts or "")]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"{worker.module}.conversion", *arguments),
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
        stdin=asyncio.subprocess.PIPE,  # its end, also that of this process, ends the conversion
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(CONVERSION_S):
            facts, errors = await asyncio.gather(_result(process, on_part), _text(process.stderr))
            status = await process.wait()
    except TimeoutError:
        raise ConfigError(f"{file} was not converted within {CONVERSION_S:.0f} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()  # it removes what is half written
            await process.wait()
    if status != 0:
        lines = errors.strip().splitlines()
        raise ConfigError(lines[-1] if lines else f"the conversion of {file} ended with status {status}")
    return ImportResult(folder=folder, **facts)


async def import_for_serving(
    file: Path,
    state: Path,
    prediction_type: str = "",
    vae: Path | None = None,
    *,
    parts: Path | None = None,
    on_part: OnPart = lambda part, size_bytes: None,
) -> ImportResult:
    """Convert the single file of a whole model, once, to a folder that a worker can load.

    A file that has changed since gets another folder, as does each prediction type, VAE and folder of parts. What the
    user has put into the folder of the file's earlier contents moves to the new one, and the rest of that is deleted.

    Args:
        state: Folder in which the service or the suite keeps its state.
        prediction_type: See `import_file`.
        vae: See `import_file`.
        parts: See `import_file`.

    Raises:
        ConfigError: It cannot be served or converted. The text is a sentence.
    """
    if refusal := refusal_of(file, prediction_type, vae, parts):
        raise ConfigError(refusal)
    try:
        folder, prefix = await asyncio.to_thread(_place, file, state, prediction_type, vae, parts)
    except OSError as error:
        raise ConfigError(f"{file} cannot be converted: {error.filename or state}: {error.strerror}") from None
    result = await import_file(file, folder, "", prediction_type, vae, parts=parts, on_part=on_part)
    await asyncio.to_thread(_replace_others, folder, prefix)
    return result


async def import_vae_for_serving(
    file: Path, state: Path, family: str, on_part: OnPart = lambda part, size_bytes: None
) -> Path:
    """Convert the single file of a VAE, once, to a folder that a worker can load, and return the folder.

    Args:
        state: See `import_for_serving`.
        family: Family of the model that gets the VAE.

    Raises:
        ConfigError: It cannot be served or converted. The text is a sentence.
    """
    if refusal := vae_refusal(file, family):
        raise ConfigError(refusal)
    try:
        folder, prefix = await asyncio.to_thread(_place, file, state, family, file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be converted: {error.filename or state}: {error.strerror}") from None
    await import_file(file, folder, family, on_part=on_part)
    await asyncio.to_thread(_replace_others, folder, prefix)
    return folder


def remove_abandoned(folder: Path) -> None:
    """Remove what an import has begun to write and a killed process has left. Do nothing while it is being written."""
    lock = ProcessLock(folder)
    try:
        lock.acquire()
    except OSError:  # also that another process holds it
        return
    try:
        shutil.rmtree(folder)
    finally:
        lock.release()


def _replace_others(folder: Path, prefix: str) -> None:
    """Delete the folders that were made from earlier versions of the same files.

    Args:
        folder: The folder made from the present version.
        prefix: Beginning of the names of all these folders.
    """
    for other in list(folder.parent.iterdir()):
        if other.name.startswith(prefix) and other != folder:
            _replace(other, folder)
        elif other.name.startswith(f".{prefix}"):
            remove_abandoned(other)


def _replace(old: Path, new: Path) -> None:
    """Delete an earlier import, after moving what it has in addition, such as ControlNets and LoRAs, to the new one."""
    with contextlib.suppress(OSError):
        for entry in list(old.iterdir()):
            if not is_there(new / entry.name):
                entry.rename(new / entry.name)
        shutil.rmtree(old)


def _place(file: Path, state: Path, setting: str, vae: Path | None, parts: Path | None = None) -> tuple[Path, str]:
    """Return the folder for a file, and the beginning of the names of the folders for all versions of it.

    A VAE is told apart by its content, because VAEs often have equal sizes, and archives can give them equal times.

    Args:
        setting: Prediction type or family.
        vae: File of the VAE that the folder gets, which may be `file`; None if the model has its own.
        parts: Folder of a model that has the parts that the file lacks; None if it lacks none.
    """
    path = file.absolute()
    same = [str(path), setting, str(vae.absolute()) if vae is not None else ""]
    if parts is not None:
        same.append(str(parts.absolute()))
    versions = [_version(path), file_digest(vae) if vae is not None else ""]
    prefix = f"{path.stem}-{_hash(*same)}-"
    make_private(state / _FOLDER)
    return state / _FOLDER / f"{prefix}{_hash(*versions)}", prefix


def _version(file: Path) -> str:
    status = file.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


async def _result(process: asyncio.subprocess.Process, on_part: OnPart) -> Mapping[str, Any]:
    """Return the last line of the conversion's output, and report the others."""
    facts: Mapping[str, Any] = {}
    assert process.stdout is not None
    async for line in process.stdout:
        facts = json.loads(line)
        if "part" in facts:
            on_part(facts["part"], facts["size_bytes"])
    return facts


async def _text(stream: asyncio.StreamReader | None) -> str:
    assert stream is not None
    return (await stream.read()).decode(errors="replace")


def _hash(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:_HASH_LETTERS]
