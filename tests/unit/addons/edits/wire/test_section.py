"""Where tensors lie in a section's file, and what no section has."""

from __future__ import annotations

import pytest

from bottega.addons.edits.wire import SECTION_ALIGNMENT, DrawnTensors, SectionLayout
from bottega.addons.edits.wire.section import MAX_SECTION_BYTES, MAX_TENSORS, OWNER_BYTES, owner
from bottega.v1 import activations_pb2


def test_tensors_lie_aligned_in_their_order_and_the_end_says_whose_they_are() -> None:
    layout = SectionLayout.of([("a", (3, 5)), ("b:map", (64,)), ("c", (1, 2, 3, 4))])
    assert [layout.place(name) for name in ("a", "b:map", "c")] == [(0, 30), (64, 128), (192, 48)]
    assert layout.size_bytes == 256 + OWNER_BYTES
    assert all(offset % SECTION_ALIGNMENT == 0 for offset in layout.offsets)
    assert layout.tensor_bytes == 30 + 128 + 48
    assert (layout.index("c"), layout.index("d")) == (2, None)
    with pytest.raises(KeyError):
        layout.place("d")


def test_a_layout_comes_back_from_the_wire() -> None:
    layout = SectionLayout.of([("a", (3, 5)), ("b", (7,))])
    assert SectionLayout.from_wire(layout.to_wire()) == layout
    assert SectionLayout.from_wire(layout.to_wire()).offsets == layout.offsets


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [("a", (1,)), ("a", (2,))],
        [("", (1,))],
        [("a" * 201, (1,))],
        [("a\n", (1,))],
        [("a", ())],
        [("a", (1,) * 5)],
        [("a", (0,))],
        [("a", (MAX_SECTION_BYTES,))],
        [("a", (MAX_SECTION_BYTES // 4,)), ("b", (MAX_SECTION_BYTES // 4,))],
        [(f"t{number}", (1,)) for number in range(MAX_TENSORS + 1)],
    ],
)
def test_what_no_section_has_is_refused(tensors: list[tuple[str, tuple[int, ...]]]) -> None:
    with pytest.raises(ValueError, match=r"section"):
        SectionLayout.of(tensors)
    wire = activations_pb2.SectionLayout(
        tensors=[activations_pb2.SectionTensor(name=name, shape=shape) for name, shape in tensors]
    )
    with pytest.raises(ValueError, match=r"section"):
        SectionLayout.from_wire(wire)


def test_the_end_of_a_file_follows_from_the_key() -> None:
    assert owner("ab" * 32) == b"\xab" * 32 + bytes(32)
    for wrong in ("ab" * 31, "xy" * 32):
        with pytest.raises(ValueError, match="hex"):
            owner(wrong)


@pytest.mark.parametrize(
    ("shape", "size_bytes"), [((1, 2, 3, 4), 95), ((2, 2, 3, 4), 192), ((1, 2, 3), 24), ((1, 0, 3, 4), 0)]
)
def test_what_a_template_was_drawn_with_has_one_shape(shape: tuple[int, ...], size_bytes: int) -> None:
    with pytest.raises(ValueError, match="image latent and noise"):
        DrawnTensors(shape=shape, image_latent=bytes(size_bytes), noise=bytes(size_bytes))
    assert DrawnTensors(shape=(1, 2, 3, 4), image_latent=bytes(96), noise=bytes(96)).size_bytes == 192
