"""What a ControlNet server remembers of what it hosts, and what callers may not make it read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bottega import rules
from bottega.controlnet.catalogue import ControlNetCatalogue
from bottega.errors import ConfigError, ControlNetExists, InvalidRequest, StorageUnavailable


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("root/edges", "root/deep/depth", "outside"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path / "root"


def catalogue(root: Path | None, folder: Path, **fixed: str) -> ControlNetCatalogue:
    return ControlNetCatalogue(folder / "state" / "controlnets.json", root=root, fixed=fixed)


def test_what_was_added_is_there_after_a_restart_and_the_same_name_is_another_folder(
    root: Path, tmp_path: Path
) -> None:
    first = catalogue(root, tmp_path, fixed="/somewhere")
    first.add("edges", first.checked("edges", "edges"))
    first.add("depth", first.checked("depth", str(root / "deep" / "depth")))
    first.add("edges", first.checked("edges", "deep/../deep/depth"))
    assert catalogue(root, tmp_path, fixed="/somewhere").folders == {
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
        catalogue(root, tmp_path).checked("edges", folder)
    assert [violation.field for violation in refusal.value.violations] == ["folder"]


def test_without_a_root_nothing_is_taken(root: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no root"):
        catalogue(None, tmp_path).checked("edges", str(root / "edges"))


def test_a_name_is_a_name(root: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="name"):
        catalogue(root, tmp_path).checked("../edges", "edges")
    with pytest.raises(ConfigError, match="controlnets"):
        ControlNetCatalogue(tmp_path / "c.json", root=None, fixed={"../x": "/x"})


@pytest.mark.parametrize("text", ["{", "[]", '{"edges": 3}'])
def test_a_damaged_file_refuses_to_start_and_is_named(root: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "controlnets.json").write_text(text)
    with pytest.raises(ConfigError, match=r"controlnets\.json"):
        catalogue(root, tmp_path)


def test_what_is_not_below_the_root_any_more_is_left_out(root: Path, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    file = tmp_path / "state" / "controlnets.json"
    file.write_text(json.dumps({"edges": str(root / "edges"), "gone": str(tmp_path / "outside")}))
    assert set(catalogue(root, tmp_path).folders) == {"edges"}


def test_what_cannot_be_written_is_not_remembered(root: Path, tmp_path: Path) -> None:
    mine = catalogue(root, tmp_path)
    (tmp_path / "state").write_text("in the way")
    with pytest.raises(StorageUnavailable, match="cannot be written"):
        mine.add("edges", root / "edges")
    assert mine.folders == {}


def test_a_name_of_the_configuration_cannot_be_added_also_after_a_restart(root: Path, tmp_path: Path) -> None:
    before = catalogue(root, tmp_path)
    before.add("edges", before.checked("edges", "edges"))
    for _ in range(2):
        mine = catalogue(root, tmp_path, edges="/somewhere")
        with pytest.raises(ControlNetExists, match="configuration has a ControlNet edges"):
            mine.checked("edges", "deep/depth")
        assert mine.folders["edges"] == Path("/somewhere")
        assert mine.root_of("edges") is None
        mine.add("depth", mine.checked("depth", "deep/depth"))
    # What was added is remembered for when the configuration has the name no more.
    after = catalogue(root, tmp_path)
    assert after.folders == {"edges": root / "edges", "depth": root / "deep" / "depth"}
    assert after.root_of("edges") == root


@pytest.mark.parametrize("file", ["config.json", "weights.safetensors", "deep/other.safetensors"])
def test_a_file_of_a_folder_that_is_a_link_out_of_the_root_is_refused(root: Path, tmp_path: Path, file: str) -> None:
    (root / "edges" / "deep").mkdir()
    (tmp_path / "outside" / "secret").touch()
    (root / "edges" / file).symlink_to(tmp_path / "outside" / "secret")
    with pytest.raises(InvalidRequest, match=f"{Path(file).name} must be below .*, links followed") as refusal:
        catalogue(root, tmp_path).checked("edges", "edges")
    assert [violation.field for violation in refusal.value.violations] == ["folder"]


def test_a_snapshot_of_the_hub_is_taken_where_its_blobs_are_below_the_root(root: Path, tmp_path: Path) -> None:
    repo = root / "models--owner--name"
    snapshot = repo / "snapshots" / "1"
    for folder in (repo / "blobs", snapshot):
        folder.mkdir(parents=True)
    for blob, name in (("ab", "config.json"), ("cd", "diffusion_pytorch_model.safetensors")):
        (repo / "blobs" / blob).touch()
        (snapshot / name).symlink_to(Path("../../blobs") / blob)
    assert catalogue(root, tmp_path).checked("net", str(snapshot)) == snapshot
    with pytest.raises(InvalidRequest, match="links followed"):
        catalogue(snapshot, tmp_path).checked("net", ".")


def test_a_folder_of_very_many_files_is_refused(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MAX_CONTROLNET_FILES", 3)
    for number in range(4):
        (root / "edges" / str(number)).touch()
    with pytest.raises(InvalidRequest, match="over 3 files"):
        catalogue(root, tmp_path).checked("edges", "edges")
