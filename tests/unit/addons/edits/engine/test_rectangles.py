"""How a mask is covered with rectangles."""

from __future__ import annotations

import numpy as np
import pytest

from bottega.addons.edits.engine.sparse.rectangles import Rectangle, cover, pays


def filled(*boxes: tuple[int, int, int, int], side: int = 32) -> np.ndarray:
    mask = np.zeros((side, side), bool)
    for top, left, height, width in boxes:
        mask[top : top + height, left : left + width] = True
    return mask


def test_a_box_is_one_rectangle() -> None:
    assert cover(filled((3, 0, 5, 7))) == (Rectangle(top=3, left=0, height=5, width=7),)


def test_nothing_is_covered_by_nothing() -> None:
    assert cover(filled()) == ()


def test_parts_far_from_each_other_are_rectangles_of_their_own() -> None:
    assert set(cover(filled((0, 0, 3, 4), (20, 25, 6, 2)))) == {
        Rectangle(top=0, left=0, height=3, width=4),
        Rectangle(top=20, left=25, height=6, width=2),
    }


def test_parts_side_by_side_are_one_where_that_costs_less() -> None:
    assert cover(filled((4, 4, 8, 8), (4, 13, 8, 8))) == (Rectangle(top=4, left=4, height=8, width=17),)


@pytest.mark.parametrize("seed", range(20))
def test_all_is_covered_once_and_never_for_more_than_the_bounding_box(seed: int) -> None:
    generator = np.random.default_rng(seed)
    mask = filled(*((*generator.integers(0, 28, 2), *generator.integers(1, 9, 2)) for _ in range(seed % 4 + 1)))
    rectangles = cover(mask)
    times = np.zeros(mask.shape, int)
    for each in rectangles:
        times[each.rows, each.columns] += 1
    assert times.max() == 1
    assert times[mask].min() == 1
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    box = Rectangle(top=0, left=0, height=int(np.ptp(rows)) + 1, width=int(np.ptp(columns)) + 1)
    assert sum(each.cost for each in rectangles) <= box.cost


def test_rectangles_of_nearly_everything_do_not_pay() -> None:
    assert not pays(cover(filled((0, 0, 31, 31))), 32, 32)
    assert pays(cover(filled((0, 0, 24, 24))), 32, 32)
