"""What may happen to a SQLite file while a service has it open: it is deleted, replaced, moved or truncated."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from bottega.storage.sqlite_files import log_of


def unlink(path: Path) -> None:
    path.unlink()


def unlink_all(path: Path) -> None:
    for part in path.parent.glob(f"{path.name}*"):
        part.unlink()


def unlink_log(path: Path) -> None:
    log_of(path).unlink()


def replace_by_nothing(path: Path) -> None:
    path.unlink()
    path.touch()


def replace_by_another(path: Path) -> None:
    path.unlink()
    path.write_bytes(b"another file" * 1000)


def move(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def remove_folder(path: Path) -> None:
    shutil.rmtree(path.parent)


def truncate(path: Path) -> None:
    os.truncate(path, 0)


def truncate_log(path: Path) -> None:
    os.truncate(log_of(path), 0)


def truncate_all(path: Path) -> None:
    for part in path.parent.glob(f"{path.name}*"):
        os.truncate(part, 0)
