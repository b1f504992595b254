"""The options, output and advice that add-ons contribute to `bottega generate`, `bottega edit` and error messages.

The `cli` module in the client code of each add-on (bottega.client.addons) has `command` (its subcommands), `PART` (a
GenerationPart) and `advice_for` (advice about its errors).
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bottega.adapter_rules import mode_names
from bottega.client.addons import add_ons_by_command
from bottega.client.cli.terminal import PlainTable, note, print_table, short_hash
from bottega.client.sdk.clients import Client
from bottega.client.types.models import AdapterKindName
from bottega.client.types.options import GenerationOptions
from bottega.client.types.provenance import Provenance
from bottega.errors import BottegaError, Forbidden, Violation


def _no_warnings(_: Provenance) -> Iterator[str]:
    yield from ()


def _merge_nothing(options: GenerationOptions, given: dict[str, Any], like: Path | None) -> None:
    """Do nothing: by default, options on the command line replace those of the earlier picture."""


def _rename_nothing(violation: Violation, options: GenerationOptions) -> Violation:
    return violation


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPart:
    """The contribution of one add-on to `bottega generate` and `bottega edit`."""

    options: tuple[Callable[[Any], Any], ...]
    """Decorators that add Click options to the command."""
    inputs: tuple[Callable[[Any], Any], ...] = ()
    """Those of `options` that give input images, which the file of a picture does not contain."""
    stage: str
    """Name of the add-on's stage in the times of a provenance."""
    describe: Callable[[Provenance], Iterator[str]]
    """Yields lines about a finished picture."""
    warn: Callable[[Provenance], Iterator[str]] = _no_warnings
    """Yields warnings about a finished picture."""
    merge: Callable[[GenerationOptions, dict[str, Any], Path | None], None] = _merge_nothing
    """Merges options of the command line into the parameters of an earlier picture (--like FILE).

    The arguments are those parameters, which it changes, the options as given, and the file; None without --like."""
    rename: Callable[[Violation, GenerationOptions], Violation] = _rename_nothing
    """Replaces the field's name in a violation with the option that set it."""
    approximations: tuple[str, ...] = ()
    """Arguments that allow approximations. A picture that was drawn exactly is drawn again without them."""
    options_of_edits: tuple[Callable[[Any], Any], ...] | None = None
    """The options that `bottega edit` gets instead of `options`; None for the same ones."""

    @property
    def edit_options(self) -> tuple[Callable[[Any], Any], ...]:
        """The options that `bottega edit` gets."""
        return self.options if self.options_of_edits is None else self.options_of_edits


def generation_parts() -> list[GenerationPart]:
    """Return the parts of all add-ons, sorted by name."""
    return [module.PART for module in _modules()]


def advice_for(error: BottegaError) -> str | None:
    """Return advice about an error that belongs to an add-on; None for other errors."""
    found: Iterator[str | None] = (module.advice_for(error) for module in _modules())
    return next((advice for advice in found if advice is not None), None)


def _modules() -> Iterator[Any]:
    for package in add_ons_by_command().values():
        yield importlib.import_module(f"{package}.cli")


AnswerT = TypeVar("AnswerT")

_TITLES: dict[AdapterKindName, str] = {"controlnet": "ControlNet", "lora": "LoRA"}


def ask_as_operator(client: Client, kind: AdapterKindName, ask: Callable[[], AnswerT]) -> AnswerT | None:
    """Call `ask`, which only operators may. Show tenants the adapters that they may name instead, and return None."""
    if not client.shows_key:
        with contextlib.suppress(Forbidden):
            return ask()
    adapters = client.adapters(kind)
    if not adapters:
        note(f"There is no {_TITLES[kind]} that you may use.")
        return None
    unions = any(adapter.control_modes for adapter in adapters)
    columns = ["trigger words"] if kind == "lora" else ["modes"] if unions else []
    table = PlainTable(kind, "for", *columns, "hash", wraps=("for", *columns), optional=("hash",))
    bases = {model.name: model.base for model in client.models()} if unions else {}
    for adapter in adapters:
        base = next((bases[model] for model in adapter.models if model in bases), "")
        words = [", ".join(adapter.trigger_words) or mode_names(adapter.control_modes, base)] if columns else []
        table.add_row(adapter.name, ", ".join(adapter.models) or "no served model", *words, short_hash(adapter.digest))
    print_table(table)
    return None
