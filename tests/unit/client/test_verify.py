"""What `bottega verify` takes for the same picture."""

from __future__ import annotations

import io
from typing import Literal

import pytest
from PIL import Image

from bottega.client.cli.verify import _replayed, compare, tolerance_for
from bottega.client.types.options import GenerationOptions
from bottega.client.types.picture import Format, Picture
from bottega.client.types.provenance import Provenance
from bottega.content_credentials import Credentials


def again(image: Image.Image, image_format: Format = "png", dtype: str = "float32") -> Picture:
    data = io.BytesIO()
    image.save(data, image_format, quality=90)
    return Picture(
        data=data.getvalue(),
        format=image_format,
        seed=1,
        width=image.width,
        height=image.height,
        index=0,
        digest="",
        job_id="",
        provenance=Provenance(dtype=dtype, exact=True),
    )


def credentials(state: Literal["valid", "trusted"], *, exact: bool) -> Credentials:
    return Credentials(state=state, signer="", failures=(), facts={"exact": exact})


def test_opacity_does_not_hide_changed_colours_and_is_compared_itself() -> None:
    clear = Image.new("RGBA", (100, 10), (9, 9, 9, 0))
    changed = clear.copy()
    changed.paste((10, 10, 10, 0), (7, 4, 9, 5))
    found = compare(again(changed).data, again(clear))
    assert (found.levels, found.place) == (1, (7, 4))
    assert found.share == pytest.approx(0.002)
    changed = clear.copy()
    changed.putpixel((3, 2), (9, 9, 9, 255))
    found = compare(again(changed).data, again(clear))
    assert (found.levels, found.place) == (255, (3, 2))


def test_a_faint_logo_is_seen_in_a_jpeg_that_nobody_trusted_signed() -> None:
    plain = Image.new("RGB", (128, 128), (90, 90, 90))
    marked = plain.copy()
    marked.paste((106, 106, 106), (8, 8, 24, 16))
    drawn = again(plain, "jpeg")
    found = compare(again(marked, "jpeg").data, drawn)
    assert found.levels == 16
    for signature in (None, credentials("valid", exact=True)):
        assert not found.is_within(tolerance_for(drawn, signature, None))
    assert found.is_within(tolerance_for(drawn, credentials("trusted", exact=True), None))


def test_half_precision_in_shared_steps_rounds_further_than_exact_pictures() -> None:
    drawn = again(Image.new("RGB", (8, 8), (90, 90, 90)), dtype="float16")
    found = compare(again(Image.new("RGB", (8, 8), (100, 100, 100))).data, drawn)
    assert found.is_within(tolerance_for(drawn, None, None))
    assert found.is_within(tolerance_for(drawn, credentials("valid", exact=False), None))
    assert not found.is_within(tolerance_for(drawn, credentials("valid", exact=True), None))


def test_an_exact_picture_is_drawn_again_without_what_add_ons_approximate() -> None:
    """The arguments are those that the add-ons of the client name."""
    options: GenerationOptions = {
        "seed": 1,
        "masked_blocks": True,
        "recording": "0" * 32,
        "stale_residuals": True,
        "step_caching": True,
        "cache_entry": f"{'0' * 32}@5",
        "bounded_lora_loading": True,
    }
    assert _replayed(options, credentials("valid", exact=True)) == {
        "seed": 1,
        "identical_results": False,
        "shared_turns": False,
        "fidelity": "exact",
        "approximate_cache": False,
    }
    assert _replayed(options, credentials("valid", exact=False)).items() >= options.items()
