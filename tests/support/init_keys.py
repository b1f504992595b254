"""The parameters of Diffusers' classes, looked up once."""

from __future__ import annotations

import functools


def remember_init_keys() -> None:
    """Have Diffusers look up the parameters of a class once in this process.

    `from_config` of a scheduler looks them up for fifteen classes: a third of the time of tests that make schedulers.
    """
    from diffusers.configuration_utils import ConfigMixin

    names = functools.cache(ConfigMixin._get_init_keys)
    ConfigMixin._get_init_keys = staticmethod(lambda input_class: set(names(input_class)))
