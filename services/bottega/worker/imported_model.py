"""The folder of a model that a worker's configuration names as a single file, which is converted before the start."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from dataclasses import replace
from pathlib import Path

from bottega.errors import ConfigError
from bottega.model_files import name_of
from bottega.process import engine_environment
from bottega.state_folder import make_private, state_folder
from bottega.worker.config import EngineConfig, is_single_file

# SDXL takes about a minute on a slow disk.
_CONVERSION_S = 1800.0
_FOLDER = "imported"
_HASH_LETTERS = 12


async def with_imported_model(config: EngineConfig) -> EngineConfig:
    """Return a configuration that names a folder, which is made from the single file that the given one names.

    The folder lies in the service's state folder, and a process of its own makes it. A file that has changed since
    gets another folder.

    Raises:
        ConfigError: The conversion fails.
    """
    if not is_single_file(config.model):
        return config
    file, folder = _places(config.model)
    await _convert(file, folder)
    name = config.model_name or name_of(str(file.with_suffix("")))
    return replace(config, model=str(folder), model_name=name)


def _places(model: str) -> tuple[Path, Path]:
    """Return the file, and the folder that is made from it."""
    file = Path(model).absolute()
    status = file.stat()
    version = f"{file}\0{status.st_size}\0{status.st_mtime_ns}"
    folder = f"{file.stem}-{hashlib.sha256(version.encode()).hexdigest()[:_HASH_LETTERS]}"
    place = Path(os.environ.get("STATE_DIRECTORY") or state_folder()) / _FOLDER
    make_private(place)
    return file, place / folder


async def _convert(file: Path, folder: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bottega.worker.conversion", str(file), str(folder)),
        env={**os.environ, **engine_environment(exclusive_cores=False)},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_CONVERSION_S):
            _, text = await process.communicate()
    except TimeoutError:
        raise ConfigError(f"the model {file} was not converted within {_CONVERSION_S:.0f} s") from None
    finally:
        if process.returncode is None:
            process.terminate()  # it removes what is half written
            await process.wait()
    if process.returncode != 0:
        lines = text.decode(errors="replace").strip().splitlines()
        raise ConfigError(lines[-1] if lines else f"converting {file} ended with {process.returncode}")
