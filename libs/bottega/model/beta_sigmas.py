"""Beta sigmas, as Diffusers' schedulers make them with SciPy, which engine processes do not load."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Both parameters of the distribution. Source: "Beta Sampling is All You Need", as in Diffusers' schedulers.
_SHAPE = 0.6
# Halvings of the interval from 0 to 1 that a quantile lies in: as many as bits count in a number between them.
_HALVINGS = 60
# The fraction below converges in some twenty terms.
_MAX_TERMS = 200
_PRECISION = 1e-15
_TINY = 1e-300
_LOG_NORM = 2 * math.lgamma(_SHAPE) - math.lgamma(2 * _SHAPE)


def beta_sigmas(scheduler: Any, in_sigmas: NDArray[np.float32], num_inference_steps: int) -> NDArray[np.float64]:
    """Return the sigmas of a schedule, as `_convert_to_beta` of Diffusers' schedulers does.

    Args:
        scheduler: A scheduler of Diffusers.
        in_sigmas: Its sigmas, descending. The first and last are the bounds unless the configuration has others.
        num_inference_steps: Number of sigmas to return.
    """
    low, high = scheduler.config.get("sigma_min"), scheduler.config.get("sigma_max")
    low = float(in_sigmas[-1]) if low is None else low
    high = float(in_sigmas[0]) if high is None else high
    return np.array([low + quantile * (high - low) for quantile in _quantiles(num_inference_steps)])


@functools.lru_cache(256)
def _quantiles(count: int) -> tuple[float, ...]:
    return tuple(_quantile(float(1.0 - place)) for place in np.linspace(0, 1, count))


def _quantile(share: float) -> float:
    """Return the number below which this share of the distribution lies."""
    if share in (0.0, 1.0):
        return share
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _share_below(middle) < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _share_below(number: float) -> float:
    """Return the share of the distribution below a number between 0 and 1: the regularized incomplete beta function."""
    if number > 0.5:  # The distribution is symmetric, and the fraction converges faster below its middle.
        return 1.0 - _share_below(1.0 - number)
    front = math.exp(_SHAPE * (math.log(number) + math.log1p(-number)) - _LOG_NORM)
    return front * _fraction(number) / _SHAPE


def _fraction(number: float) -> float:
    """Return the continued fraction of the incomplete beta function, by Lentz's method.

    Source: NIST Digital Library of Mathematical Functions, 8.17.22.
    """
    above, below = 1.0, 1.0 / (1.0 - 2 * _SHAPE * number / (_SHAPE + 1))
    result = below
    for term in range(1, _MAX_TERMS):
        even = term * (_SHAPE - term) * number / ((_SHAPE + 2 * term - 1) * (_SHAPE + 2 * term))
        odd = -(_SHAPE + term) * (2 * _SHAPE + term) * number / ((_SHAPE + 2 * term) * (_SHAPE + 2 * term + 1))
        for coefficient in (even, odd):
            below = 1.0 / ((1.0 + coefficient * below) or _TINY)
            above = (1.0 + coefficient / above) or _TINY
            result *= above * below
        if abs(above * below - 1.0) < _PRECISION:
            break
    return result
