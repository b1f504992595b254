"""Profiles in a folder, while they change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bottega.blobstore.profiles import ProfileFolder
from bottega.v1.cache_pb2 import CacheLengthClass, CacheProfile


class Key(str):
    """A key whose comparison lets another thread change the profiles."""

    __slots__ = ()
    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    def __lt__(self, other: str) -> bool:
        Key.meanwhile()
        return str(self) < str(other)


def test_profiles_that_change_meanwhile_are_listed_as_they_were(tmp_path: Path) -> None:
    folder = ProfileFolder(
        tmp_path,
        CacheProfile,
        key=lambda profile: Key(profile.model_hash),
        check=lambda profile: (),
        is_empty=lambda profile: not profile.balanced,
        remedy="measure it again",
        max_file_bytes=1 << 16,
    )
    for model in ("aa", "bb"):
        folder.set(CacheProfile(model_hash=model, balanced=[CacheLengthClass()]))
    Key.meanwhile = staticmethod(lambda: folder.set(CacheProfile(model_hash="aa")))
    try:
        assert [profile.model_hash for profile in folder.all()] == ["aa", "bb"]
    finally:
        Key.meanwhile = staticmethod(lambda: None)
    assert [profile.model_hash for profile in folder.all()] == ["bb"]
