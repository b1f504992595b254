"""Whether ControlNet residuals one step old pay: pipelined mode against synchronous mode. Plain numbers."""

from __future__ import annotations

# Below this cosine between the residuals of adjacent steps, those of the step before are another picture's.
LEAST_SIMILARITY = 0.99
# Of a step: less waiting than that is not worth an approximation.
_LEAST_GAIN = 0.1


def pipelines(similarity: float, *, answer_s: float, transfer_s: float, encoder_s: float, step_s: float) -> bool:
    """Whether steps should go on with the residuals of the step before.

    similarity: cosine of a ControlNet's residuals between adjacent steps, from its profile. answer_s: from a step
    asked for to its last residual, as measured of late on this link; 0 is not known. transfer_s: what of it the link
    took. encoder_s: of the step, until the first residual is needed. step_s: of the whole step, waiting included.

    Waiting for a server that computes is no reason: it would be as busy, and the picture another one.
    """
    if similarity < LEAST_SIMILARITY or answer_s <= 0.0 or step_s <= 0.0:
        return False
    return min(answer_s - encoder_s, transfer_s) > _LEAST_GAIN * step_s
