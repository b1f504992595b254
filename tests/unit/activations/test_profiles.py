"""Profiles of blocks are kept as they were measured, and what is damaged is none."""

from __future__ import annotations

from pathlib import Path

from bottega.activations.profiles import profile_folder, profile_key
from bottega.blobstore.profiles import ProfileFolder
from bottega.v1.activations_pb2 import BlockCost, BlockProfile
from tests.support.stored_templates import block_profile


def _folder(path: Path) -> ProfileFolder[BlockProfile]:
    made = profile_folder(path)
    made.open()
    return made


def test_a_profile_is_of_a_model_its_element_type_and_a_size(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "profiles")
    made = [block_profile(), block_profile(dtype="float16"), block_profile(height=64), block_profile(model_hash="12")]
    for each in made:
        folder.set(each)
    newer = block_profile(about="measured again")
    folder.set(newer)
    again = _folder(tmp_path / "profiles")
    assert [again.get(profile_key(each)) for each in made] == [newer, *made[1:]]
    assert again.all() == folder.all()
    again.set(block_profile(blocks=()))
    assert again.get(profile_key(newer)) is None
    assert len(_folder(tmp_path / "profiles").all()) == 3


def test_the_largest_profile_is_kept(tmp_path: Path) -> None:
    shares = [number / 8 for number in range(1, 9)]
    blocks = [
        BlockCost(name=f"{number:0200d}", size_bytes=1 << 40, full_s=1 / 3, masked_s=[1 / 7] * 8)
        for number in range(4096)
    ]
    largest = block_profile(shares=shares, blocks=blocks)
    _folder(tmp_path).set(largest)
    found = _folder(tmp_path).all()
    assert found == [largest]
    assert isinstance(found[0], BlockProfile)
