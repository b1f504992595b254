"""The add-ons' part in commands that are not their own.

The `cli` module of each package in bottega.client.addons has `command` (its subcommands), `PART` (what it adds to
`bottega generate` and `bottega edit`) and `advice_for` (what to do about its errors).
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bottega.client.addons import add_on_names
from bottega.client.cli.terminal import PlainTable, note, print_table, short_hash
from bottega.client.sdk.clients import Client
from bottega.client.types.models import AdapterKindName
from bottega.client.types.options import GenerationOptions
from bottega.client.types.provenance import Provenance
from bottega.errors import BottegaError, Forbidden, Violation


def _no_warnings(_: Provenance) -> Iterator[str]:
    yield from ()


def _merge_nothing(options: GenerationOptions, given: dict[str, Any], like: Path | None) -> None:
    """What is given replaces what the earlier picture had, as every other option does."""


def _rename_nothing(violation: Violation, options: GenerationOptions) -> Violation:
    return violation


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPart:
    """What an add-on adds to `bottega generate`."""

    options: tuple[Callable[[Any], Any], ...]
    """Click's decorators."""
    stage: str
    """The provenance's name of what a picture waited for before it was denoised."""
    describe: Callable[[Provenance], Iterator[str]]
    """Yields lines about a picture that was drawn."""
    warn: Callable[[Provenance], Iterator[str]] = _no_warnings
    """Yields what people may not expect of the picture."""
    merge: Callable[[GenerationOptions, dict[str, Any], Path | None], None] = _merge_nothing
    """Moves what was given into the options, which are those of an earlier picture with --like."""
    rename: Callable[[Violation, GenerationOptions], Violation] = _rename_nothing
    """Names what is wrong with a request by the options of the command line."""
    options_of_edits: tuple[Callable[[Any], Any], ...] | None = None
    """Those of `bottega edit`; None for the same ones."""

    @property
    def edit_options(self) -> tuple[Callable[[Any], Any], ...]:
        """Those of `bottega edit`."""
        return self.options if self.options_of_edits is None else self.options_of_edits


def generation_parts() -> list[GenerationPart]:
    """Of all add-ons, in their order."""
    return [_module(name).PART for name in add_on_names()]


def advice_for(error: BottegaError) -> str | None:
    """What to do about an error of an add-on; None where it is none of theirs."""
    found: Iterator[str | None] = (_module(name).advice_for(error) for name in add_on_names())
    return next((advice for advice in found if advice is not None), None)


def _module(add_on: str) -> Any:
    return importlib.import_module(f"bottega.client.addons.{add_on}.cli")


AnswerT = TypeVar("AnswerT")

_TITLES: dict[AdapterKindName, str] = {"controlnet": "ControlNet", "lora": "LoRA"}


def ask_as_operator(client: Client, kind: AdapterKindName, ask: Callable[[], AnswerT]) -> AnswerT | None:
    """Return what `ask` gives an operator. For a tenant, print the adapters that it may name and return None."""
    if not client.shows_key:
        with contextlib.suppress(Forbidden):
            return ask()
    adapters = client.adapters(kind)
    if not adapters:
        note(f"There is no {_TITLES[kind]} that you may use.")
        return None
    columns = ["trigger words"] if kind == "lora" else []
    table = PlainTable(kind, "for", *columns, "hash", wraps=("for", *columns), optional=("hash",))
    for adapter in adapters:
        words = [", ".join(adapter.trigger_words)] if columns else []
        table.add_row(adapter.name, ", ".join(adapter.models) or "no model here", *words, short_hash(adapter.digest))
    print_table(table)
    return None
