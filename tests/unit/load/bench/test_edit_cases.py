"""Templates and edits of the benches: an edit asks for one other thing, and its mask has room for it."""

from __future__ import annotations

import numpy as np
import pytest

from bottega.miniature.scenes import Placed, SceneLayout, Thing, render
from bottega.quality import oracle
from load.bench.edit_cases import Template, box, edits_of, templates

TEMPLATES = templates(12, 3)


@pytest.mark.parametrize("template", TEMPLATES)
def test_an_edit_wants_one_other_thing_that_training_never_saw(template: Template) -> None:
    shown = oracle.read(template.picture)
    there = {(seen.shape, seen.colour) for seen in shown.things}
    for case in edits_of(template, 7):
        wanted = {(thing.shape, thing.colour) for thing in case.wanted.things}
        assert case.wanted.held_out
        assert case.wanted.ground == shown.ground
        assert len(wanted - there) == len(there - wanted) == 1
    assert [case.again for case in edits_of(template, 7)] == [False, True] * 3
    assert [case.seed for case in edits_of(template, 7)] == [7, 8, 9, 10, 11, 12]


def test_every_second_template_has_two_things_and_they_are_the_same_every_time() -> None:
    assert [len(template.wanted[0].things) for template in TEMPLATES] == [1, 2] * 6
    again = templates(12, 3)
    assert [each.wanted for each in again] == [each.wanted for each in TEMPLATES]
    assert all(one.picture.tobytes() == other.picture.tobytes() for one, other in zip(again, TEMPLATES, strict=True))


def test_a_box_has_the_thing_and_a_margin_around_it() -> None:
    placed = Placed(thing=Thing(shape="square", colour="red"), x=0.5, y=0.4, radius=0.2)
    drawn = np.asarray(render(SceneLayout(placed=(placed,), ground="white")))
    rows, columns = np.nonzero(np.abs(drawn.astype(int) - drawn[0, 0]).max(axis=2) > 8)
    left, upper, right, lower = box(placed).getbbox() or (0, 0, 0, 0)
    assert left + 4 <= columns.min() <= columns.max() <= right - 5
    assert upper + 4 <= rows.min() <= rows.max() <= lower - 5
