"""What was acknowledged survives a power cut: which calls of the operating system come before it, in which order.

A test can cut no power. So the calls of the system are written down as they are made; the disk below them is real.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bottega.errors import StorageUnavailable
from bottega.storage import ContentStore, folders

DATA = b"a picture" * 10_000
DIGEST = hashlib.sha256(DATA).hexdigest()


class SystemCalls:
    """Writes down what puts names and bytes on the disk: "fsync PATH SIZE" of a file, "fsync PATH" of a folder,
    "mkdir PATH" and "rename FROM TO", with paths relative to `root`.

    fails: paths whose fsync fails.
    """

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        self.fails: set[Path] = set()
        self._root = root
        self._fsync = os.fsync
        patch.setattr(os, "fsync", self._watched_fsync)
        for name, told in (("mkdir", "mkdir"), ("rename", "rename"), ("replace", "rename")):
            patch.setattr(os, name, self._watched(getattr(os, name), told))

    def _watched_fsync(self, descriptor: int) -> None:
        path, status = Path(f"/proc/self/fd/{descriptor}").readlink(), os.fstat(descriptor)
        if path in self.fails:
            raise OSError(errno.EIO, "the disk lost it")
        self._fsync(descriptor)
        size = "" if stat.S_ISDIR(status.st_mode) else f" {status.st_size}"
        self.made.append(f"fsync {self._name(path)}{size}")

    def _watched(self, call: Callable[..., Any], told: str) -> Callable[..., Any]:
        def watched(*paths: Any, **options: Any) -> Any:
            result = call(*paths, **options)
            self.made.append(" ".join([told, *(self._name(path) for path in paths if isinstance(path, str | Path))]))
            return result

        return watched

    def _name(self, path: str | Path) -> str:
        return os.path.relpath(path, self._root)


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SystemCalls:
    return SystemCalls(tmp_path, monkeypatch)


async def _store(folder: Path) -> ContentStore:
    store = ContentStore(folder, budget_bytes=1 << 20, ttl_s=60)
    await store.open()
    return store


async def test_an_image_is_acknowledged_when_its_bytes_and_its_name_are_on_the_disk(
    tmp_path: Path, calls: SystemCalls
) -> None:
    store = await _store(tmp_path / "images")
    calls.made.clear()
    await store.put(DIGEST, DATA)
    acknowledged = list(calls.made)
    await store.close()
    shard = f"images/{DIGEST[:2]}"
    assert acknowledged == [
        f"mkdir {shard}",
        "fsync images",
        f"fsync images/incoming/{DIGEST} {len(DATA)}",
        f"rename images/incoming/{DIGEST} {shard}/{DIGEST}",
        f"fsync {shard}",
    ]


async def test_an_image_of_an_earlier_life_is_acknowledged_again_when_its_name_is_on_the_disk(
    tmp_path: Path, calls: SystemCalls
) -> None:
    for _ in range(2):  # as if the first life had been killed between the rename and the fsync after it
        store = await _store(tmp_path / "images")
        calls.made.clear()
        await store.put(DIGEST, DATA)
        await store.close()
    assert calls.made == [f"fsync images/{DIGEST[:2]}"]


@pytest.mark.parametrize("lost", [f"incoming/{DIGEST}", DIGEST[:2]], ids=["bytes", "name"])
async def test_an_image_that_may_not_be_on_the_disk_is_not_acknowledged_and_not_there(
    tmp_path: Path, calls: SystemCalls, lost: str
) -> None:
    folders.make(tmp_path / "images" / DIGEST[:2])
    store = await _store(tmp_path / "images")
    calls.fails.add(tmp_path / "images" / lost)
    with pytest.raises(StorageUnavailable) as raised:
        await store.put(DIGEST, DATA)
    assert raised.value.metadata["cause"] == "EIO"
    assert await store.get(DIGEST) is None
    assert [path for path in (tmp_path / "images").rglob("*") if path.is_file()] == []
    calls.fails.clear()
    await store.put(DIGEST, DATA)
    assert await store.get(DIGEST) == DATA
    await store.close()


def test_every_new_folder_is_in_the_one_above_it_when_it_is_made(tmp_path: Path, calls: SystemCalls) -> None:
    folders.make(tmp_path / "a" / "b" / "c")
    assert calls.made == ["mkdir a", "fsync .", "mkdir a/b", "fsync a", "mkdir a/b/c", "fsync a/b"]
    folders.make(tmp_path / "a" / "b" / "c")
    assert len(calls.made) == 6
