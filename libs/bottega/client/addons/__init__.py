"""Finds the client code of each add-on: the subpackage `client` of every package in bottega.addons.

Such a package has `COMMAND`, the name of the add-on's subcommand of `bottega`, and `HELP`, one line of help about it.
Its `sdk` module has `ADD_ON`, titles and checks for `bottega fleet`, and methods for the SDK's clients. Its `cli`
module has the subcommands, `PART` (options of `bottega generate` and `bottega edit`) and `advice_for` (advice about its
errors). Only bottega.client.sdk.clients lists the add-ons by name.
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
    """Return the name of each add-on's client package by its subcommand, in alphabetical order."""
    names = (f"bottega.addons.{found.name}.client" for found in pkgutil.iter_modules(bottega.addons.__path__))
    return dict(sorted((import_module(name).COMMAND, name) for name in names if find_spec(name) is not None))
