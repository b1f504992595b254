"""How many steps cached latents have saved a picture of late, by what requests have to have in common for that.

Measured from what completed jobs report, and nothing else: what was never measured saves nothing.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

from bottega.v1.generation_pb2 import GenerationSpec

# Pictures that the mean reaches back: prompts drift, and entries come and go.
_WINDOW = 64
# Pictures of a key before anything is expected: of fewer the mean says little.
_LEAST = 8
# Keys that are remembered: each is a set of parameters that somebody draws with.
_MOST_KEYS = 4096

# What pictures that start from each other's latents may differ in, or what only says how they are delivered.
_NOT_IN_KEY = ("prompt", "seed", "num_images", "format", "quality", "techniques")

RateKey = bytes


def rate_key(bare: GenerationSpec, tenant: str) -> RateKey:
    """What a request has in common with those that may serve it, as far as the gateway knows.

    A little coarser than the store's own key: control images are not in it. bare: complete, without input images.
    tenant: whose request it is.
    """
    common = GenerationSpec()
    common.CopyFrom(bare)
    for name in _NOT_IN_KEY:
        common.ClearField(name)  # type: ignore[arg-type]
    digest = hashlib.blake2b(tenant.encode(), digest_size=16)
    digest.update(b"\0" + common.SerializeToString(deterministic=True))
    return digest.digest()


@dataclass(slots=True)
class _Savings:
    """The mean over the pictures of late. pictures: that were measured, up to the window."""

    pictures: int = 0
    skipped: float = 0.0

    def record(self, skipped: int) -> None:
        """The first ones count alike; from the window on, older ones count less and less."""
        self.pictures = min(self.pictures + 1, _WINDOW)
        self.skipped += (skipped - self.skipped) / self.pictures


class HitRates:
    """Hit rates, in steps: those that a picture skipped on average, with those that started from noise counted in."""

    def __init__(self) -> None:
        self._savings: OrderedDict[RateKey, _Savings] = OrderedDict()

    def record(self, key: RateKey, skipped: int) -> None:
        """A picture that might start from a cached latent skipped so many steps; 0 where it started from noise."""
        self._savings.setdefault(key, _Savings()).record(skipped)
        self._savings.move_to_end(key)
        while len(self._savings) > _MOST_KEYS:
            self._savings.popitem(last=False)

    def skipped_steps(self, key: RateKey) -> float:
        """Steps that a picture is expected to skip; 0 as long as too few were measured."""
        savings = self._savings.get(key)
        return savings.skipped if savings is not None and savings.pictures >= _LEAST else 0.0
