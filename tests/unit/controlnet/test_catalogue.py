"""What a ControlNet server remembers of what it hosts, and what callers may not make it read."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bottega import rules
from bottega.controlnet.catalogue import SCHEMA, ControlNetCatalogue
from bottega.errors import ConfigError, ControlNetExists, DataLoss, InvalidRequest, StorageUnavailable
from bottega.storage import SqliteDatabase


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("root/edges", "root/deep/depth", "outside"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path / "root"


def catalogue(root: Path | None, folder: Path, **fixed: str) -> ControlNetCatalogue:
    database = SqliteDatabase(folder / "state" / "controlnets.db", SCHEMA)
    return ControlNetCatalogue(database, root=root, fixed=fixed)


@contextlib.asynccontextmanager
async def opened(root: Path | None, folder: Path, **fixed: str) -> AsyncIterator[ControlNetCatalogue]:
    made = catalogue(root, folder, **fixed)
    await made.open()
    try:
        yield made
    finally:
        await made.close()


async def add(catalogue: ControlNetCatalogue, name: str, folder: str) -> None:
    await catalogue.add(name, catalogue.check_folder(name, folder))


async def test_what_was_added_is_there_after_a_restart_and_the_same_name_is_another_folder(
    root: Path, tmp_path: Path
) -> None:
    async with opened(root, tmp_path, fixed="/somewhere") as first:
        await add(first, "edges", "edges")
        await add(first, "depth", str(root / "deep" / "depth"))
        await add(first, "edges", "deep/../deep/depth")
    async with opened(root, tmp_path, fixed="/somewhere") as again:
        assert again.folders == {
            "fixed": Path("/somewhere"),
            "edges": root / "deep" / "depth",
            "depth": root / "deep" / "depth",
        }


@pytest.mark.parametrize(
    "folder",
    ["../outside", "/etc", "link", "circle", "edges/../../outside", "missing", "", "a\0b", "x" * 300],
)
def test_no_folder_outside_the_root_is_taken_links_followed(root: Path, tmp_path: Path, folder: str) -> None:
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "circle").symlink_to(root / "circle")
    with pytest.raises(InvalidRequest) as refusal:
        catalogue(root, tmp_path).check_folder("edges", folder)
    assert [violation.field for violation in refusal.value.violations] == ["folder"]


def test_a_name_is_a_name(root: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="name"):
        catalogue(root, tmp_path).check_folder("../edges", "edges")
    with pytest.raises(InvalidRequest, match="no root"):
        catalogue(None, tmp_path).check_folder("edges", str(root / "edges"))
    with pytest.raises(ConfigError, match="controlnets"):
        catalogue(None, tmp_path, **{"../x": "/x"})


async def test_a_damaged_file_is_kept_aside_and_after_eight_of_them_the_disk_is_to_blame(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(root, tmp_path, fixed="/somewhere") as first:
        await add(first, "edges", "edges")
    file = tmp_path / "state" / "controlnets.db"
    file.write_bytes(damaged := b"x" * 4096)
    async with opened(root, tmp_path, fixed="/somewhere") as again:
        assert set(again.folders) == {"fixed"}
    assert [aside.read_bytes() for aside in file.parent.glob("controlnets.damaged-*.db")] == [damaged]
    assert "bottega controlnets add" in caplog.text
    for number in range(1, 8):
        (file.parent / f"controlnets.damaged-{number}.db").touch()
    file.write_bytes(damaged)
    with pytest.raises(DataLoss, match="already 8 damaged files"):
        await catalogue(root, tmp_path).open()
    assert file.read_bytes() == damaged


async def test_a_damaged_row_is_left_out_and_told_of(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(root, tmp_path) as first:
        await add(first, "edges", "edges")
        await add(first, "depth", "deep/depth")
    with contextlib.closing(sqlite3.connect(tmp_path / "state" / "controlnets.db")) as connection, connection:
        connection.execute("UPDATE controlnets SET folder = ? WHERE name = 'edges'", (str(root / "deep" / "depth"),))
    async with opened(root, tmp_path) as again:
        assert set(again.folders) == {"depth"}
        assert [vars(line)["row"] for line in caplog.records] == ["edges"]
        await add(again, "edges", "edges")
    async with opened(root, tmp_path) as later:
        assert later.folders["edges"] == root / "edges"


async def test_what_is_not_below_the_root_any_more_is_left_out(root: Path, tmp_path: Path) -> None:
    async with opened(tmp_path, tmp_path) as wider:
        await add(wider, "edges", "root/edges")
        await add(wider, "gone", "outside")
    async with opened(root, tmp_path) as mine:
        assert set(mine.folders) == {"edges"}


async def test_what_cannot_be_written_is_not_remembered_and_the_others_are_hosted(root: Path, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("in the way")
    async with opened(root, tmp_path, fixed="/somewhere") as mine:
        with pytest.raises(StorageUnavailable):
            await add(mine, "edges", "edges")
        assert set(mine.folders) == {"fixed"}


async def test_a_name_of_the_configuration_cannot_be_added_also_after_a_restart(root: Path, tmp_path: Path) -> None:
    async with opened(root, tmp_path) as before:
        await add(before, "edges", "edges")
    for _ in range(2):
        async with opened(root, tmp_path, edges="/somewhere") as mine:
            with pytest.raises(ControlNetExists, match="configuration has a ControlNet edges"):
                mine.check_folder("edges", "deep/depth")
            assert mine.folders["edges"] == Path("/somewhere")
            assert mine.root_of("edges") is None
            await add(mine, "depth", "deep/depth")
    # What was added is remembered for when the configuration has the name no more.
    async with opened(root, tmp_path) as after:
        assert after.folders == {"edges": root / "edges", "depth": root / "deep" / "depth"}
        assert after.root_of("edges") == root


@pytest.mark.parametrize("file", ["config.json", "deep/other.safetensors"])
def test_a_file_of_a_folder_that_is_a_link_out_of_the_root_is_refused(root: Path, tmp_path: Path, file: str) -> None:
    (root / "edges" / "deep").mkdir()
    (tmp_path / "outside" / "secret").touch()
    (root / "edges" / file).symlink_to(tmp_path / "outside" / "secret")
    with pytest.raises(
        InvalidRequest, match=f"{Path(file).name} must be below .*, after links are resolved"
    ) as refusal:
        catalogue(root, tmp_path).check_folder("edges", "edges")
    assert [violation.field for violation in refusal.value.violations] == ["folder"]


def test_a_snapshot_of_the_hub_is_taken_where_its_blobs_are_below_the_root(root: Path, tmp_path: Path) -> None:
    repo = root / "models--owner--name"
    snapshot = repo / "snapshots" / "1"
    for folder in (repo / "blobs", snapshot):
        folder.mkdir(parents=True)
    for blob, name in (("ab", "config.json"), ("cd", "diffusion_pytorch_model.safetensors")):
        (repo / "blobs" / blob).touch()
        (snapshot / name).symlink_to(Path("../../blobs") / blob)
    assert catalogue(root, tmp_path).check_folder("net", str(snapshot)) == snapshot
    with pytest.raises(InvalidRequest, match="after links are resolved"):
        catalogue(snapshot, tmp_path).check_folder("net", ".")


def test_a_folder_of_very_many_files_is_refused(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MAX_CONTROLNET_FILES", 3)
    for number in range(4):
        (root / "edges" / str(number)).touch()
    with pytest.raises(InvalidRequest, match="over 3 files"):
        catalogue(root, tmp_path).check_folder("edges", "edges")
