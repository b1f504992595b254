"""What callers name is read below the root that is allowed, and nothing else, whatever is changed meanwhile."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bottega.storage.folders import check_below, listed, open_below, resolved_below


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root" / "net").mkdir(parents=True)
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "root" / "net" / "file").write_bytes(b"mine")
    return (tmp_path / "root").resolve()


def test_a_file_below_the_root_is_opened_links_within_followed(root: Path) -> None:
    # As the hub's cache lies on a disk: a snapshot's files are links to blobs beside it.
    (root / "blobs").mkdir()
    (root / "blobs" / "ab").write_bytes(b"blob")
    snapshot = root / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to("../../blobs/ab")
    check_below([snapshot / "config.json"], root)
    for path, content in ((root / "net" / "file", b"mine"), (snapshot / "config.json", b"blob")):
        with open_below(path, root) as file:
            assert file.read() == content


@pytest.mark.parametrize("link", ["absolute", "relative", "of a folder", "of a link"])
def test_a_link_out_of_the_root_is_refused_before_and_when_it_is_opened(root: Path, tmp_path: Path, link: str) -> None:
    path = root / "net" / "link"
    match link:
        case "absolute":
            path.symlink_to(tmp_path / "secret")
        case "relative":
            path.symlink_to("../../secret")
        case "of a folder":
            (root / "out").symlink_to(tmp_path)
            path = root / "out" / "secret"
        case _:
            (root / "second").symlink_to(tmp_path / "secret")
            path.symlink_to(root / "second")
    ways: tuple[Callable[[], object], ...] = (lambda: check_below([path], root), lambda: open_below(path, root))
    for refuse in ways:
        with pytest.raises(OSError, match="after links are resolved") as refused:
            refuse()
        assert refused.value.errno == errno.EXDEV
        assert refused.value.filename == path.name
    with open_below(path, None) as file:  # an operator's own may be anywhere
        assert file.read() == b"secret"


@pytest.mark.parametrize("place", ["the file", "its folder"])
def test_what_takes_the_place_of_a_file_after_the_check_is_not_read(root: Path, tmp_path: Path, place: str) -> None:
    path = root / "net" / "file"
    check_below([path], root)
    assert resolved_below(Path("net"), root) == root / "net"
    if place == "the file":
        path.unlink()
        path.symlink_to(tmp_path / "secret")
    else:
        (tmp_path / "file").write_bytes(b"secret")
        (root / "net").rename(root / "aside")
        (root / "net").symlink_to(tmp_path)
    with pytest.raises(OSError, match="after links are resolved"):
        open_below(path, root)


def test_no_descriptor_is_left_behind(root: Path, tmp_path: Path) -> None:
    (root / "link").symlink_to(tmp_path / "secret")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for path in (root / "link", root / "net", root / "nothing"):
        with pytest.raises(OSError):  # noqa: PT011 - whichever it is
            open_below(path, root)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_what_is_no_file_is_refused_and_not_waited_for(root: Path) -> None:
    os.mkfifo(root / "pipe")
    (root / "device").symlink_to("/dev/zero")
    for name in ("pipe", "device", "net"):
        with pytest.raises(OSError, match="no regular file"):
            open_below(root / name, root)


def test_links_in_circles_and_long_names_are_errors_of_the_system(root: Path) -> None:
    (root / "circle").symlink_to(root / "circle")
    for path in ("circle", "circle/file"):
        with pytest.raises(OSError, match="circles"):
            resolved_below(Path(path), root)
    with pytest.raises(OSError, match="after links are resolved"):
        resolved_below(Path("/etc"), root)


def test_a_folder_is_listed_without_its_linked_folders_up_to_a_bound(root: Path, tmp_path: Path) -> None:
    for path in ("a.x", "net/b.x", "net/c.y"):
        (root / path).touch()
    (tmp_path / "d.x").touch()
    (root / "out").symlink_to(tmp_path)
    assert sorted(listed(root, ".x", most=6, deep=True)) == [root / "a.x", root / "net" / "b.x"]
    assert list(listed(root, ".x", most=6, deep=False)) == [root / "a.x"]
    with pytest.raises(OSError, match="over 5 files"):
        list(listed(root, ".x", most=5, deep=True))
