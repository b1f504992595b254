"""Decides whether steps use the ControlNet residuals of the step before."""

from __future__ import annotations

# Below this cosine between the residuals of adjacent steps, old residuals belong to another picture.
LEAST_SIMILARITY = 0.99
# Waiting for less than this share of a step does not justify an approximation.
_LEAST_GAIN = 0.1


def pipelines(similarity: float, *, answer_s: float, transfer_s: float, encoder_s: float, step_s: float) -> bool:
    """Return whether steps should use the residuals of the step before.

    They should if that hides the transfer time of a slow link. It cannot save time that the server spends computing:
    the server has to compute as much as before.

    Args:
        similarity: Cosine of a ControlNet's residuals between adjacent steps, from its profile.
        answer_s: Recently measured time on this link from the request of a step to its last residual; 0 if unknown.
        transfer_s: The link's part of answer_s.
        encoder_s: Time of the step until the first residual is needed.
        step_s: Time of the whole step, waiting included.
    """
    if similarity < LEAST_SIMILARITY or answer_s <= 0.0 or step_s <= 0.0:
        return False
    return min(answer_s - encoder_s, transfer_s) > _LEAST_GAIN * step_s
