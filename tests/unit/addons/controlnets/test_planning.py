"""When steps go on with the residuals of the step before."""

from __future__ import annotations

import pytest

from bottega.addons.controlnets.planning import pipelines


@pytest.mark.parametrize(
    ("similarity", "answer_s", "transfer_s", "encoder_s", "step_s", "expected"),
    [
        (0.995, 0.5, 0.4, 0.1, 0.7, True),  # waiting for the link is more than half of the step
        (0.989, 0.5, 0.4, 0.1, 0.7, False),  # the residuals of the step before are too different
        (0.995, 0.11, 0.1, 0.1, 0.3, False),  # the encoder hides nearly all of it
        (0.995, 0.5, 0.01, 0.1, 0.7, False),  # the server computes for so long, and the link is quick
        (0.995, 0.0, 0.0, 0.1, 0.3, False),  # the link was not measured yet
        (0.995, 0.5, 0.4, 0.1, 0.0, False),  # nor the step
    ],
)
def test_only_where_it_saves_a_good_part_of_a_step_and_changes_little(
    similarity: float, answer_s: float, transfer_s: float, encoder_s: float, step_s: float, expected: bool
) -> None:
    times = {"answer_s": answer_s, "transfer_s": transfer_s, "encoder_s": encoder_s, "step_s": step_s}
    assert pipelines(similarity, **times) is expected
