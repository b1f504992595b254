"""Finds the client's parts of the add-ons: the package `client` of every package in bottega.addons.

It has the name of its subcommand of `bottega`, and what `--help` says of that. Its `sdk` module has `ADD_ON`, a
description for people, and the methods that bottega.client.sdk.clients adds to the clients. Its `cli` module has the
subcommands, `PART` (options of `bottega generate` and `bottega edit`) and `advice_for` (what to do about its errors).
Only bottega.client.sdk.clients lists the add-ons by name.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec

import bottega.addons


@functools.cache
def add_ons_by_command() -> Mapping[str, str]:
    """Return the packages with the client's parts of the add-ons, by subcommand, in alphabetical order."""
    names = (f"bottega.addons.{found.name}.client" for found in pkgutil.iter_modules(bottega.addons.__path__))
    return dict(sorted((import_module(name).COMMAND, name) for name in names if find_spec(name) is not None))
