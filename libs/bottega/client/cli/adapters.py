"""What a tenant is told of ControlNets and LoRAs: those that it may name. Operators are told more, by each command."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

from bottega.client.cli.terminal import PlainTable, note, print_table, short_hash
from bottega.client.sdk.clients import Client
from bottega.client.types.models import AdapterKindName
from bottega.errors import Forbidden

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
