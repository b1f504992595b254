"""Layouts survive their encoding, align their tensors, and whatever else comes as one is refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.transport import DType, Layout, Limits, TensorSpec
from bottega.transport.layout import (
    ALIGNMENT_BYTES,
    MAX_ENCODED_BYTES,
    MAX_LAYOUT_BYTES,
    MAX_NAME_BYTES,
    MAX_RANK,
    MAX_TENSORS,
)
from bottega.v1.tensor_pb2 import DataType

NAMES = st.text(st.characters(categories=("L", "N", "P", "Zs")), min_size=1, max_size=40).filter(str.isprintable)
SPECS = st.builds(
    lambda name, dtype, shape: TensorSpec(name=name, dtype=dtype, shape=tuple(shape)),
    name=NAMES,
    dtype=st.sampled_from(DType),
    shape=st.lists(st.integers(1, 50), max_size=4),
)
LAYOUTS = st.lists(SPECS, min_size=1, max_size=12, unique_by=lambda spec: spec.name).map(lambda s: Layout.of(*s))
PLAIN = Layout.of(
    TensorSpec(name="a", dtype=DType.FLOAT32, shape=(3, 5)), TensorSpec(name="b", dtype=DType.UINT8, shape=())
)


@settings(max_examples=50)
@given(LAYOUTS)
def test_a_layout_comes_back_as_it_was(layout: Layout) -> None:
    assert Layout.decode(layout.encode()) == layout


@settings(max_examples=50)
@given(LAYOUTS)
def test_tensors_are_aligned_and_never_overlap(layout: Layout) -> None:
    end = 0
    for spec, offset in zip(layout.specs, layout.offsets, strict=True):
        assert offset % ALIGNMENT_BYTES == 0
        assert end <= offset < end + ALIGNMENT_BYTES
        end = offset + spec.size_bytes
    assert end <= layout.size_bytes < end + ALIGNMENT_BYTES
    assert layout.size_bytes % ALIGNMENT_BYTES == 0
    views = layout.views(memoryview(bytearray(layout.size_bytes)))
    assert [len(view) for view in views] == [spec.size_bytes for spec in layout.specs]


@settings(max_examples=50)
@given(LAYOUTS, LAYOUTS)
def test_digests_are_equal_exactly_when_layouts_are(first: Layout, second: Layout) -> None:
    assert (first.digest == second.digest) == (first.specs == second.specs)


@given(st.binary(max_size=200))
def test_untrusted_bytes_are_a_layout_or_a_value_error(encoded: bytes) -> None:
    try:
        layout = Layout.decode(encoded)
    except ValueError:
        return
    assert layout.encode() == encoded


@given(LAYOUTS, st.data())
def test_a_mutated_layout_is_another_one_or_a_value_error(layout: Layout, data: st.DataObject) -> None:
    encoded = bytearray(layout.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(encoded[: data.draw(st.integers(0, len(encoded)))])
    for mutant in (bytes(encoded), cut, bytes(encoded) + b"\0"):
        try:
            decoded = Layout.decode(mutant)
        except ValueError:
            continue
        assert decoded.encode() == mutant
        assert decoded.size_bytes <= MAX_LAYOUT_BYTES


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("", (1,)),
        ("x" * (MAX_NAME_BYTES + 1), (1,)),
        ("é" * (MAX_NAME_BYTES // 2 + 1), (1,)),
        ("new\nline", (1,)),
        ("\ud800", (1,)),
        ("x", (1,) * (MAX_RANK + 1)),
        ("x", (0,)),
        ("x", (MAX_LAYOUT_BYTES // 4 + 1,)),
        ("x", (2**63,)),
    ],
)
def test_a_tensor_out_of_bounds_is_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        TensorSpec(name=name, dtype=DType.FLOAT32, shape=shape)


def test_a_layout_out_of_bounds_is_refused() -> None:
    half = MAX_LAYOUT_BYTES // 2
    long = "x" * (MAX_NAME_BYTES - 4)
    for specs in (
        [],
        [TensorSpec(name="a", dtype=DType.UINT8, shape=()), TensorSpec(name="a", dtype=DType.INT64, shape=(2,))],
        [TensorSpec(name=f"{i}", dtype=DType.UINT8, shape=()) for i in range(MAX_TENSORS + 1)],
        [TensorSpec(name=f"{i}", dtype=DType.UINT8, shape=(half,)) for i in range(3)],
        [TensorSpec(name=f"{long}{i:04}", dtype=DType.UINT8, shape=(1,) * MAX_RANK) for i in range(MAX_TENSORS)],
    ):
        with pytest.raises(ValueError, match="layout"):
            Layout.of(*specs)


def test_the_largest_layout_that_there_may_be_comes_back() -> None:
    specs = [TensorSpec(name=f"{i:0200}", dtype=DType.UINT8, shape=(1, 2)) for i in range(MAX_TENSORS)]
    layout = Layout.of(*specs)
    assert len(layout.encode()) <= MAX_ENCODED_BYTES
    assert Layout.decode(layout.encode()) == layout


@pytest.mark.parametrize(
    ("at", "value"), [(0, 255), (4, 0), (4, 201), (5, 0), (5, 6), (6, 9), (6, 1), (7, 0xFF), (8, 0), (15, 0x80)]
)
def test_a_lie_in_any_field_is_found(at: int, value: int) -> None:
    encoded = bytearray(PLAIN.encode())
    assert encoded[at] != value
    encoded[at] = value
    with pytest.raises(ValueError, match=r".+"):
        Layout.decode(bytes(encoded))


def test_a_span_holds_the_tensors_and_the_gaps_between_them() -> None:
    assert PLAIN.span(0, 1) == (0, 60)
    assert PLAIN.span(1, 2) == (64, 65)
    assert PLAIN.span(0, 2) == (0, 65)


def test_element_types_have_the_contracts_numbers() -> None:
    assert {f"DATA_TYPE_{dtype.name}": int(dtype) for dtype in DType} == {
        name: number for name, number in DataType.items() if number
    }
    assert math.prod(dtype.item_bytes for dtype in DType) == 4 * 2 * 2 * 1 * 8


@pytest.mark.parametrize(
    "fields",
    [{"slots": 0}, {"slots": 65}, {"slot_bytes": 63}, {"slot_bytes": 2**41}, {"layouts": 0}, {"layouts": 1025}],
)
def test_limits_that_no_link_can_have_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"a (link|slot)"):
        Limits(**fields)
