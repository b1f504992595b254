"""Decides whether a step uses the ControlNet residuals of the step before, to hide a slow network."""

from __future__ import annotations

# Below this cosine between the residuals of adjacent steps, old residuals belong to another picture.
LEAST_SIMILARITY = 0.99
# Waiting for less than this share of a step does not justify an approximation.
_LEAST_GAIN = 0.1


def pipelines(similarity: float, *, answer_s: float, transfer_s: float, encoder_s: float, step_s: float) -> bool:
    """Return whether steps should use the residuals of the step before.

    They should if that hides the transfer time of a slow connection. It cannot hide the time that the server computes,
    because the server has to compute as much as before.

    Args:
        similarity: Cosine between residuals of adjacent steps, from the ControlNet's profile.
        answer_s: Recent seconds from the request of a step to its last residual; 0 if unknown.
        transfer_s: The part of `answer_s` in which residuals are transferred.
        encoder_s: Seconds of a step until the first residual is needed.
        step_s: Seconds of the whole step, including waits.
    """
    if similarity < LEAST_SIMILARITY or answer_s <= 0.0 or step_s <= 0.0:
        return False
    return min(answer_s - encoder_s, transfer_s) > _LEAST_GAIN * step_s
