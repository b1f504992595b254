"""What lies in a model's folders `controlnets` and `loras`: hosted by name, or left out with a reason."""

from __future__ import annotations

from pathlib import Path

from bottega import rules
from bottega.miniature import WEIGHTS
from bottega.model_files.own_files import own_controlnets, own_loras


def test_the_embedded_model_has_its_own_and_leaves_out_none() -> None:
    assert set(own_controlnets(WEIGHTS).hosted) == {"edges", "layout"}
    assert set(own_loras(WEIGHTS).hosted) == {"checked", "dusk", "striped"}
    assert (own_controlnets(WEIGHTS).left_out, own_loras(WEIGHTS).left_out) == ({}, {})


def test_a_model_without_such_folders_has_none(tmp_path: Path) -> None:
    assert own_controlnets(tmp_path).hosted == own_loras(tmp_path).hosted == {}


def test_folders_are_controlnets_and_single_files_and_odd_names_are_left_out(tmp_path: Path) -> None:
    for folder in ("canny", "no config", ".cache"):
        (tmp_path / "controlnets" / folder).mkdir(parents=True)
    for file in ("depth.safetensors", "pose.pth", "README.md"):
        (tmp_path / "controlnets" / file).touch()
    own = own_controlnets(tmp_path)
    assert own.hosted == {"canny": str(tmp_path / "controlnets" / "canny")}
    assert set(own.left_out) == {"no config", "depth.safetensors", "pose.pth"}
    assert own.left_out["no config"] == f"nobody can ask for its name; rename it: {rules.ADAPTER_NAMES}"
    assert "single file" in own.left_out["depth.safetensors"]


def test_files_and_folders_are_loras_and_what_nobody_can_ask_for_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "loras" / "ink").mkdir(parents=True)
    for file in ("wash.safetensors", "ink.safetensors", "~.safetensors", "old.pt", "notes.txt"):
        (tmp_path / "loras" / file).touch()
    own = own_loras(tmp_path)
    assert set(own.hosted) == {"wash"}
    assert set(own.left_out) == {"ink", "ink.safetensors", "~.safetensors", "old.pt"}
    assert own.left_out["old.pt"] == "it is pickled, and only safetensors are opened; convert it"
    assert own.left_out["ink"] == "it has the name of another file or folder here; rename one of them"
