"""A file with more parts than images have is refused before a decoder sees it; whatever is taken is decoded soon."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from PIL import Image

from bottega.codec import images, structure
from bottega.errors import BadImage
from tests.samples import hostile_images as hostile

# A tenth of what the smallest of them took before they were refused. By this process's own clock: what else runs on the
# machine does not count.
_SOON_S = 0.5
REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "scans of the largest image": (lambda: hostile.scans(3000), "33 JPEG scans or more .*; at most 536870912"),
    "scans of three components": (lambda: hostile.scans(99, components=(1, 2, 3)), "11 JPEG scans or more"),
    "scans of a small image": (lambda: hostile.scans(101, side=64), "101 JPEG scans or more; at most 100"),
    "segments": (lambda: hostile.segments(2_000_000), "more than 1024 JPEG segments; at most 1024"),
    "restart intervals": (lambda: hostile.segments(1_300_000, 0xDD, b"\0\1"), "at most 1024"),
    "EXIF in many parts": (lambda: hostile.exif_segments(500_000, 2), "more than 1024 JPEG segments"),
    "EXIF in large parts": (
        lambda: hostile.exif_segments(100, 60_000),
        "1080108 bytes of EXIF or more; at most 1048576",
    ),
    "padding": (
        lambda: hostile.jpeg_with(b"\xff" * 8_000_000),
        "bytes or more between its JPEG segments; at most 65536",
    ),
    "stray bytes": (lambda: hostile.jpeg_with(bytes(8_000_000)), "between its JPEG segments; at most 65536"),
    "arithmetic codes": (hostile.arithmetic, "baseline and progressive are accepted"),
    "damaged texts": (lambda: hostile.compressed_texts(7900), "7900 PNG texts; at most 128"),
    "colour profiles": (lambda: hostile.colour_profiles(7900), "7900 PNG chunks iCCP; at most 1"),
    "unknown chunks": (lambda: hostile.chunks(690_000), "more than 16384 PNG chunks; at most 16384"),
    "pixels in tiny chunks": (lambda: hostile.tiny_pixel_chunks(690_000), "more than 16384 PNG chunks"),
    "EXIF of a PNG": (
        lambda: hostile.png_with(hostile.chunk(b"eXIf", hostile.exif(65_535, 2**20 + 1))),
        "1048577 bytes of EXIF; at most 1048576",
    ),
    "EXIF as the text of a PNG": (
        lambda: hostile.png_with(hostile.chunk(b"tEXt", b"exif\0" + hostile.exif(65_535, 2**20 + 1))),
        "1048577 bytes of EXIF; at most 1048576",
    ),
    "chunks of a WebP": (lambda: hostile.webp_with(1_000_000), "more than 256 WebP chunks; at most 256"),
    "EXIF of a WebP": (lambda: hostile.webp_with(1, b"EXIF", hostile.exif(65_535, 2**20 + 1)), "1048577 bytes of EXIF"),
    "frames of a WebP": (lambda: hostile.webp_with(60_000, b"ANMF", bytes(24)), "animated"),
    "a long line": (lambda: hostile.png_of(2**24, 1, interlaced=True), "16777216x1; at most 16384 pixels a side"),
    "a tall line": (lambda: hostile.png_of(1, 2**20), "1x1048576; at most 16384 pixels a side"),
}
# At the bounds: these are decoded, and nothing that is taken takes longer.
TAKEN: dict[str, Callable[[], bytes]] = {
    "scans of the largest image": lambda: hostile.scans(32, refine=True),
    "scans of a small image": lambda: hostile.scans(100, side=64),
    "segments": lambda: hostile.segments(1000),
    "EXIF in many parts": lambda: hostile.exif_segments(1000, 1000),
    "padding": lambda: hostile.jpeg_with(b"\xff" * 65_000),
    "damaged texts": lambda: hostile.compressed_texts(128),
    "a colour profile": lambda: hostile.colour_profiles(1),
    "unknown chunks": lambda: hostile.chunks(16_000),
    "pixels in tiny chunks": lambda: hostile.tiny_pixel_chunks(16_000),
    "chunks of a WebP": lambda: hostile.webp_with(250),
    "16 bits, interlaced": lambda: hostile.png_of(4096, 4096, interlaced=True),
}


def spent_s(work: Callable[[], object]) -> float:
    """Processor seconds of this thread."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


@pytest.mark.parametrize("name", REFUSED)
def test_more_parts_than_images_have_are_refused_at_once_with_what_was_found_and_what_is_taken(name: str) -> None:
    make, said = REFUSED[name]
    data = make()
    assert len(data) <= structure.MAX_IMAGE_BYTES, "else its size is what is refused"

    def refuse() -> None:
        with pytest.raises(BadImage, match=said) as refusal:
            images.decode(data, 512, 512)
        assert refusal.value.message.startswith("the image")

    assert spent_s(refuse) < _SOON_S


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_at_the_bounds_is_decoded_well_within_the_limit_of_processor_time(name: str) -> None:
    data = TAKEN[name]()
    assert spent_s(lambda: images.decode(data, 512, 512)) < structure.DECODE_CPU_S / 2


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("options", [{"progressive": True}, {"restart_marker_blocks": 1}, {"subsampling": 0}], ids=str)
def test_what_encoders_write_is_taken(mode: str, options: dict[str, object]) -> None:
    noise = Image.effect_noise((500, 300), 90).convert(mode)
    images.decode(hostile.saved(noise, "JPEG", quality=95, **options), 0, 0)


def test_a_picture_with_others_in_one_file_is_taken_as_the_first_of_them() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    several = hostile.saved(frames[0], "MPO", save_all=True, append_images=frames[1:])
    pixels = images.decode(several, 0, 0).pixels
    assert pixels.data[0] > 200


def test_what_stands_behind_a_picture_does_not_count() -> None:
    image = Image.new("RGB", (64, 64), "teal")
    for name, options in (("JPEG", {}), ("JPEG", {"progressive": True}), ("PNG", {}), ("WEBP", {})):
        behind = b"\xff\xda\0\x08" * 1_000_000  # as in the film that telephones put behind a photograph
        images.decode(hostile.saved(image, name, **options) + behind, 0, 0)


def test_scans_of_a_preview_inside_a_segment_do_not_count() -> None:
    preview = hostile.segment(0xE2, b"\xff\xda\0\x08" * 16_000)
    images.decode(hostile.jpeg_with(preview * 20), 0, 0)


@pytest.mark.parametrize(
    "disguise",
    [b"\xff", b"\xff\xd0", b"\xff\x01", b"stray", b"\xff\xfe\0\0", hostile.segment(0xFE, b"said")],
    ids=["padding", "a restart", "a reserved marker", "stray bytes", "no length", "a comment"],
)
def test_scans_are_counted_whatever_stands_between_them(disguise: bytes) -> None:
    data = hostile.scans(200).replace(b"\xff\xda", disguise + b"\xff\xda")
    with pytest.raises(BadImage, match="JPEG scans or more"):
        structure.check(data)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xd8\xff",
        b"\xff\xd8\xff\xda",
        b"\xff\xd8\xff\xc0\0",
        b"\x89PNG\r\n\x1a\n\0\0",
        b"RIFF",
        b"RIFF\0\0\0\0WEBPVP8X",
    ],
)
def test_a_file_that_ends_early_is_left_to_its_decoder(data: bytes) -> None:
    with pytest.raises(BadImage):
        images.decode(data, 0, 0)
    assert structure.claimed_pixels(data) <= 1


def test_large_images_are_told_by_their_header() -> None:
    for name, options in (("PNG", {}), ("JPEG", {}), ("WEBP", {}), ("WEBP", {"lossless": True})):
        small, large = (hostile.saved(Image.new("RGB", (side, 2048)), name, **options) for side in (2048, 2064))
        assert structure.claimed_pixels(small) == structure.LARGE_PIXELS
        assert structure.claimed_pixels(large) > structure.LARGE_PIXELS
    progressive = hostile.saved(Image.new("RGB", (2048, 1024)), "JPEG", progressive=True)
    assert structure.claimed_pixels(progressive) == 4 * 2048 * 1024
    assert structure.claimed_pixels(b"") == 0
    assert structure.claimed_pixels(b"GIF89a") == 0


def test_what_needs_more_memory_than_there_is_is_refused_and_no_more() -> None:
    script = (
        "import sys; from bottega.codec import images; from bottega.errors import BadImage\n"
        "try: images.decode(sys.stdin.buffer.read(), 16384, 16384)\n"
        "except BadImage as refusal: print(refusal.message)"
    )
    done = subprocess.run(
        ["prlimit", f"--as={2**29}", sys.executable, "-c", script],
        input=hostile.saved(Image.new("RGB", (1024, 1024))),
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.decode().strip() == "the image needs more memory than its decoder may have"
