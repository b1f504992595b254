"""Pictures of a long bench come back as they were drawn, whole batches alone, and never another bench's."""

from pathlib import Path

import PIL.Image
import pytest

from bottega.diffusion.engine.events import CachedStart
from load.bench.kept_pictures import KeptPictures, PictureFolder

START = CachedStart(image=1, entry="e1", step=6, from_step=6, skipped_steps=4, similarity=0.93, without_loras=True)


def picture(red: int) -> PIL.Image.Image:
    return PIL.Image.new("RGB", (4, 3), (red, 1, 2))


BATCHES = [
    (["a", "b"], [KeptPictures(pictures=(picture(1), picture(2)), starts=(None, START))] * 2),
    (["c"], [KeptPictures(pictures=(picture(3),), starts=(None,))]),
]


def kept(folder: Path) -> PictureFolder:
    pictures = PictureFolder(folder)
    for asks, drawn in BATCHES:
        assert pictures.take(asks) is None
        pictures.keep(asks, drawn)
    return pictures


def test_batches_come_back_in_their_order(tmp_path: Path) -> None:
    kept(tmp_path)
    again = PictureFolder(tmp_path)
    for asks, drawn in BATCHES:
        found = again.take(asks)
        assert found is not None
        assert [each.starts for each in found] == [each.starts for each in drawn]
        for each, wanted in zip(found, drawn, strict=True):
            assert [one.tobytes() for one in each.pictures] == [one.tobytes() for one in wanted.pictures]
    assert again.take(["d"]) is None


def test_another_bench_is_refused(tmp_path: Path) -> None:
    kept(tmp_path)
    with pytest.raises(SystemExit, match=r"0000\.json is of other options"):
        PictureFolder(tmp_path).take(["a", "c"])


def test_a_batch_that_was_not_finished_is_drawn_again(tmp_path: Path) -> None:
    kept(tmp_path)
    (tmp_path / "0001.json").unlink()
    again = PictureFolder(tmp_path)
    assert again.take(["a", "b"]) is not None
    assert again.take(["c"]) is None
