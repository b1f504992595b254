"""Rules for a model's scheduler: which classes and fields of scheduler_config.json are not served."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


def check_scheduler_config(config: Mapping[str, object]) -> Iterator[str]:
    """Yield a sentence for the class and for each field of scheduler_config.json that is not served.

    A sentence names the field and says what to do; the caller puts the file's name before it.
    """
    yield from ()
