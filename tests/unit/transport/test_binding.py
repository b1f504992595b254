"""Where a service's own socket for links is: where others find it, and where nobody else may put one."""

from __future__ import annotations

import grp
import os
import re
import socket
import stat
import tempfile
from pathlib import Path

import pytest

from bottega.errors import ConfigError
from bottega.transport import default_socket_path, links_group
from bottega.transport.handshake.binding import bind_unix
from tests.support.other_user import GROUP, USER, needs_root

NOT_PRIVATE = (0o755, 0o770, 0o701, 0o1777)


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR", "BOTTEGA_LINKS_GROUP"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder for temporary files' one of this user, which is not there yet."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"bottega-{os.getuid()}"


def test_it_is_in_the_folder_that_systemd_made_for_the_unit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", f"{tmp_path}:/run/other")
    assert default_socket_path("worker") == tmp_path / "links.sock"


def test_it_is_in_the_folder_for_what_the_user_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_socket_path("worker").parent == tmp_path / "bottega"
    assert stat.S_IMODE((tmp_path / "bottega").stat().st_mode) == 0o700


def test_else_it_is_in_a_folder_of_this_user_alone_and_no_two_services_share_one(own_folder: Path) -> None:
    before = os.umask(0)
    try:
        path = default_socket_path("worker")
    finally:
        os.umask(before)
    assert path.parent == own_folder
    assert stat.S_IMODE(own_folder.stat().st_mode) == 0o700
    assert default_socket_path("worker") == path
    assert default_socket_path("controlnet") != path


@needs_root
def test_a_folder_that_another_user_made_first_is_refused_with_what_to_do(own_folder: Path) -> None:
    own_folder.mkdir(mode=0o700)
    os.chown(own_folder, USER, USER)
    with pytest.raises(ConfigError, match=rf"{re.escape(str(own_folder))} belongs to user {USER}.*root.*links\.socket"):
        default_socket_path("worker")
    with pytest.raises(ConfigError, match=f"belongs to user {USER}"):  # also where it was chosen before that
        bind_unix(own_folder / "worker-1.sock")
    assert not list(own_folder.iterdir())


def test_a_link_in_its_place_is_refused_wherever_it_leads(own_folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    own_folder.symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="is a link"):
        default_socket_path("worker")
    with pytest.raises(ConfigError, match="is a link"):
        bind_unix(own_folder / "worker-1.sock")
    assert not list(elsewhere.iterdir())


def test_a_file_in_its_place_is_refused(own_folder: Path) -> None:
    own_folder.write_text("")
    with pytest.raises(ConfigError, match="is no folder"):
        default_socket_path("worker")


@pytest.mark.parametrize("mode", NOT_PRIVATE, ids=oct)
def test_a_folder_that_is_open_to_others_is_refused(own_folder: Path, mode: int) -> None:
    own_folder.mkdir()
    own_folder.chmod(mode)
    with pytest.raises(ConfigError, match=f"open to others.*chmod .*00 {re.escape(str(own_folder))}"):
        default_socket_path("worker")


@pytest.mark.parametrize("mode", NOT_PRIVATE, ids=oct)
def test_the_folder_for_what_the_user_runs_is_passed_over_where_it_is_open_to_others(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: int
) -> None:
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    runtime.chmod(mode)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert default_socket_path("worker").parent == own_folder


@needs_root
def test_the_folder_for_what_another_user_runs_is_passed_over(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    os.chown(runtime, USER, USER)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert default_socket_path("worker").parent == own_folder


def test_a_folder_that_is_not_there_is_a_config_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="No such file"):
        default_socket_path("worker")
    with pytest.raises(ConfigError, match="No such file"):
        bind_unix(tmp_path / "missing" / "links.sock")


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777], ids=oct)
def test_no_socket_is_made_where_others_could_put_theirs(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ConfigError, match="writable for others"):
        bind_unix(folder / "links.sock")
    assert not list(folder.iterdir())


def test_a_socket_is_for_its_user_whatever_the_umask_is(tmp_path: Path) -> None:
    path = tmp_path / "links.sock"
    before = os.umask(0)
    try:
        bind_unix(path).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@needs_root
def test_a_socket_is_for_the_group_that_shares_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOTTEGA_LINKS_GROUP", "games")
    path = tmp_path / "links.sock"
    bind_unix(path).close()
    found = path.stat()
    assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o660, grp.getgrnam("games").gr_gid)


def test_a_group_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert links_group() is None
    monkeypatch.setenv("BOTTEGA_LINKS_GROUP", f"no-group-{GROUP}")
    with pytest.raises(ConfigError, match=f"BOTTEGA_LINKS_GROUP names group no-group-{GROUP}.*groupadd"):
        bind_unix(tmp_path / "links.sock")
    with socket.socket(socket.AF_UNIX) as free:
        free.bind(str(tmp_path / "links.sock"))  # nothing was left behind
