"""Room on a LoRA store's disk: what is coming counts before it is there, and what stays free for others stays free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bottega.errors import QueueFull, StorageUnavailable, TooLarge, Violation
from bottega.loras.config import ImportConfig
from bottega.loras.files import DiskQuota
from bottega.loras.upload import Upload, UploadLimits, UploadPart, check_upload
from tests.support.full_disk import fill, small_disk

_DISK_BYTES = 4 << 20


def _room(folder: Path, *, budget_bytes: int = 1000, kept_bytes: int = 0, min_free_bytes: int = 0) -> DiskQuota:
    return DiskQuota(folder, budget_bytes=budget_bytes, min_free_bytes=min_free_bytes, kept_bytes=lambda: kept_bytes)


def test_what_is_promised_counts_until_it_is_given_back(tmp_path: Path) -> None:
    room = _room(tmp_path, kept_bytes=300)
    first = room.reserve(600)
    assert room.reserved_bytes == 600
    with pytest.raises(QueueFull) as caught:
        room.reserve(101)
    assert caught.value.message == (
        "running uploads have reserved 600 of the 1000 bytes that the store may use on its disk (disk_bytes); try "
        "again when they have ended"
    )
    assert caught.value.retry_after_s
    room.reserve(100)
    room.release(first)
    room.reserve(600)


def test_what_the_budget_never_has_room_for_is_too_large(tmp_path: Path) -> None:
    room = _room(tmp_path, kept_bytes=300)
    room.reserve(600)
    with pytest.raises(TooLarge) as caught:
        room.reserve(701)
    assert caught.value.message == (
        "the store may use 1000 bytes on its disk (disk_bytes): 300 are used, including the quarantine, and this LoRA "
        "needs 701; remove some LoRAs, or empty the quarantine (bottega loras quarantine)"
    )


def test_a_reservation_grows_as_far_as_there_is_room(tmp_path: Path) -> None:
    room = _room(tmp_path)
    first, other = room.reserve(100), room.reserve(300)
    room.grow(first, 500)
    assert first.size_bytes == 500
    room.grow(other, 900)
    assert other.size_bytes == 500
    room.grow(other, 100)
    assert (other.size_bytes, room.reserved_bytes) == (500, 1000)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", size_bytes=_DISK_BYTES) as made:
        yield made


def test_what_is_written_already_is_not_counted_twice_against_the_disk(disk: Path) -> None:
    room = _room(disk, budget_bytes=1 << 40)
    first = room.reserve(3 << 20)
    with pytest.raises(
        StorageUnavailable, match=f"the disk is full.* of which {3 << 20} are reserved for running uploads"
    ) as caught:
        room.reserve(2 << 20)
    assert (caught.value.metadata["cause"], bool(caught.value.retry_after_s)) == ("ENOSPC", True)
    first.files.append(disk / "upload")
    (disk / "upload").write_bytes(bytes(2 << 20))
    with pytest.raises(StorageUnavailable, match=f"of which {1 << 20} are reserved for running uploads"):
        room.reserve(2 << 20)
    room.reserve(512 << 10)


def test_a_share_of_the_disk_stays_free_for_others(disk: Path) -> None:
    reserve_bytes = 100 << 10
    room = _room(disk, budget_bytes=1 << 40, min_free_bytes=reserve_bytes)
    with pytest.raises(StorageUnavailable, match=f"{reserve_bytes} must stay free"):
        room.reserve(_DISK_BYTES - reserve_bytes + 1)
    room.reserve(_DISK_BYTES - reserve_bytes)
    room.check_disk()
    ballast = fill(disk)
    with pytest.raises(StorageUnavailable, match="min_free_bytes"):
        room.check_disk()
    ballast.unlink()
    room.check_disk()


def test_of_a_small_disk_a_twentieth_stays_free(disk: Path) -> None:
    room = _room(disk, budget_bytes=1 << 40, min_free_bytes=1 << 30)
    with pytest.raises(StorageUnavailable, match=f"{_DISK_BYTES // 20} must stay free"):
        room.reserve(_DISK_BYTES)


def test_uploads_are_bounded_in_number_and_bytes_and_one_host_has_half_of_each() -> None:
    uploads = UploadLimits(max_uploads=4, max_total_bytes=100, max_bytes=10)

    def refused(host: str, said: str) -> None:
        with pytest.raises(QueueFull, match=said) as caught, uploads.admitted(host, 1):
            pass
        assert caught.value.retry_after_s

    with uploads.admitted("a", 10), uploads.admitted("a", 10):
        refused("a", "your host has 2 unfinished uploads of 20 bytes")
        with uploads.admitted("b", 10), uploads.admitted("c", 10):
            refused("d", "the store has 4 unfinished uploads of 40 bytes")
    with uploads.admitted("a", 50):
        refused("a", "your host has 1 unfinished uploads of 50 bytes")
        with uploads.admitted("b", 50):
            refused("c", "the store has 2 unfinished uploads of 100 bytes")


def test_one_host_may_always_bring_one_file_of_the_largest_size() -> None:
    uploads = UploadLimits(max_uploads=1, max_total_bytes=100, max_bytes=90)
    with uploads.admitted("a", 90), pytest.raises(QueueFull), uploads.admitted("b", 1):
        pass


def test_uploads_that_may_never_be_as_large_as_a_file_may_be_are_refused_as_a_configuration() -> None:
    with pytest.raises(ValueError, match="upload_bytes is 5; it must be at least max_bytes, 6"):
        ImportConfig(max_bytes=6, upload_bytes=5)


_PART = UploadPart(component="unet", size_bytes=9, adapter_config=b"")


@pytest.mark.parametrize(
    ("change", "field", "rule"),
    [
        ({"sha256": "A" * 64}, "sha256", "must be 64 hexadecimal digits, in lower case"),
        ({"size_bytes": 11}, "size_bytes", "must be from 1 to 10"),
        ({"adapter_config": bytes((1 << 20) + 1)}, "adapter_config", "must be at most 1048576 bytes"),
        (
            {"adapter_config": b"{}", "parts": (_PART,)},
            "adapter_config",
            "must be empty if there are parts, which have their own",
        ),
        (
            {"parts": (_PART, _PART)},
            "parts",
            "each must be for a different component: text_encoder, text_encoder_2, text_encoder_3, transformer, unet",
        ),
        (
            {"parts": (replace(_PART, adapter_config=bytes((1 << 20) + 1)),)},
            "parts[0].adapter_config",
            "must be at most 1048576 bytes",
        ),
        ({"parts": (replace(_PART, size_bytes=8),)}, "size_bytes", "must be the sum of the parts' sizes"),
    ],
)
def test_an_upload_that_cannot_be_is_refused_by_its_field(change: dict[str, Any], field: str, rule: str) -> None:
    upload = Upload(sha256="0" * 64, size_bytes=9, adapter_config=b"")
    assert list(check_upload(upload, max_bytes=10)) == []
    assert list(check_upload(replace(upload, **change), max_bytes=10)) == [Violation(field=field, description=rule)]
