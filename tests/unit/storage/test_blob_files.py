"""The files of a store: their checksums, room for them on the disk, and folders that somebody has deleted."""

from __future__ import annotations

import hashlib
import os
import random
import re
import shutil
from pathlib import Path

import pytest

from bottega.errors import StorageUnavailable
from bottega.storage import BlobFiles

NAME, NEIGHBOUR = (f"ab{number:030x}@5" for number in range(2))
DATA = b"a latent"
# As SDXL's latents at 512 pixels: the digest is of all of a file, however large.
_BYTES = 4 * 64 * 64 * 2


def _files(folder: Path, min_free_bytes: int = 0) -> BlobFiles:
    return BlobFiles(folder, names=re.compile(r"[0-9a-f]{32}@[0-9]{1,3}"), min_free_bytes=min_free_bytes)


def _read(files: BlobFiles, name: str) -> bytes | None:
    return files.read(name, digest=hashlib.sha256(DATA).digest(), size_bytes=len(DATA))


def test_a_folder_that_is_gone_is_made_again_after_one_failure(tmp_path: Path) -> None:
    files = _files(tmp_path)
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
    files = _files(tmp_path, min_free_bytes=1)
    files.check_room(1)
    with pytest.raises(StorageUnavailable, match="1 stay free"):
        files.check_room(1 << 60)
    _files(tmp_path).check_room(1 << 60)  # the system itself says when it is full


def test_a_file_that_is_copied_has_the_bytes_of_its_source(tmp_path: Path) -> None:
    files, source = _files(tmp_path / "files"), tmp_path / "source"
    files.open()
    source.write_bytes(DATA + b" and more")
    descriptor = os.open(source, os.O_RDONLY)
    try:
        files.copy(NAME, descriptor, len(DATA))
        assert _read(files, NAME) == DATA
        assert files.size(NAME) == len(DATA)
        with pytest.raises(StorageUnavailable):
            files.copy(NEIGHBOUR, descriptor, 100)
    finally:
        os.close(descriptor)
    assert files.size(NEIGHBOUR) is None
    assert files.open() == {NAME}


@pytest.mark.parametrize("flips", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_every_flipped_bit_is_noticed(tmp_path: Path, flips: int) -> None:
    chance = random.Random(0)
    files = _files(tmp_path)
    files.open()
    data = chance.randbytes(_BYTES)
    digest = hashlib.sha256(data).digest()
    files.write(NAME, data)
    found = 0
    with files.path(NAME).open("r+b", buffering=0) as file:
        for bit in chance.sample(range(8 * _BYTES), flips):
            place, flipped = bit // 8, data[bit // 8] ^ (1 << bit % 8)
            file.seek(place)
            file.write(bytes([flipped]))
            found += files.read(NAME, digest=digest, size_bytes=_BYTES) is None
            file.seek(place)
            file.write(data[place : place + 1])
    assert found == flips
    assert files.read(NAME, digest=digest, size_bytes=_BYTES) == data


@pytest.mark.parametrize("name", ["..", "ab", f"{'ab' * 16}", f"../{NAME}", f"{NAME}/x", NAME.upper()])
def test_only_valid_names_become_paths(tmp_path: Path, name: str) -> None:
    files = _files(tmp_path)
    files.open()
    with pytest.raises(ValueError, match="not the name"):
        files.remove([name])
