"""Files of latents: room for them on the disk, and folders that somebody has deleted."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from bottega.cache.disk.latent_files import LatentFiles, latent_name
from bottega.errors import StorageUnavailable

NAME, NEIGHBOUR = (latent_name(f"ab{number:030x}", 5) for number in range(2))
DATA = b"a latent"


def _read(files: LatentFiles, name: str) -> bytes | None:
    return files.read(name, digest=hashlib.sha256(DATA).digest(), size_bytes=len(DATA))


def test_a_folder_that_is_gone_is_made_again_after_one_failure(tmp_path: Path) -> None:
    files = LatentFiles(tmp_path)
    files.open()
    files.write(NAME, DATA)
    shutil.rmtree(tmp_path / "ab")
    assert _read(files, NAME) is None
    with pytest.raises(StorageUnavailable):
        files.write(NEIGHBOUR, DATA)
    assert list((tmp_path / "incoming").iterdir()) == []
    files.write(NEIGHBOUR, DATA)
    assert _read(files, NEIGHBOUR) == DATA
    assert files.open() == {NEIGHBOUR}


def test_what_is_to_come_counts_as_well_where_some_of_the_disk_stays_free(tmp_path: Path) -> None:
    files = LatentFiles(tmp_path, min_free_bytes=1)
    files.check_room(1)
    with pytest.raises(StorageUnavailable, match="1 stay free"):
        files.check_room(1 << 60)
    LatentFiles(tmp_path).check_room(1 << 60)  # the system itself says when it is full


@pytest.mark.parametrize("name", ["..", "ab", f"{'ab' * 16}", f"../{NAME}", f"{NAME}/x", NAME.upper()])
def test_what_is_no_name_of_a_latent_names_no_file(tmp_path: Path, name: str) -> None:
    files = LatentFiles(tmp_path)
    files.open()
    with pytest.raises(ValueError, match="not the name"):
        files.remove([name])
