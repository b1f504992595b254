"""Rules for the configuration of a model's UNet: which fields have values that are not served."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


def check_unet_config(config: Mapping[str, object]) -> Iterator[str]:
    """Yield a sentence for each field of the UNet's config.json whose value is not served.

    A sentence names the field and says what to do; the caller puts the file's name before it.
    """
    yield from ()
