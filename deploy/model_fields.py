"""Writes which fields of model folders are served into the page of bottega.model_files: `python deploy/model_fields.py
[PAGE]`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bottega.model_files.configuration_rules import INDEX_RULES, TOKENIZER_RULES
from bottega.model_files.field_rules import FieldRule, shown
from bottega.model_files.text_encoder_rules import TEXT_ENCODER_RULES
from bottega.model_files.unet_rules import UNET_RULES
from bottega.model_files.vae_rules import VAE_RULES

PAGE = Path(__file__).resolve().parent.parent / "libs/bottega/model_files/README.md"
TABLES: Mapping[str, Sequence[FieldRule]] = {
    "index": INDEX_RULES,
    "unet": UNET_RULES,
    "vae": VAE_RULES,
    "text_encoder": TEXT_ENCODER_RULES,
    "tokenizer": TOKENIZER_RULES,
}
"""The page's tables, by the name in their marks."""


def table(rules: Sequence[FieldRule]) -> str:
    """Return a table with a row for each rule."""
    head = ("| field | default | served | why |", "|---|---|---|---|")
    rows = (f"| `{rule.name}` | {_short(rule.default)} | {rule.values.text} | {rule.why} |" for rule in rules)
    return "".join(f"{line}\n" for line in (*head, *rows))


def page(text: str) -> str:
    """Return the page with the tables as they are now.

    Args:
        text: The page as it was.
    """
    for name, rules in TABLES.items():
        begin, end = f"<!-- {name} begin -->\n", f"<!-- {name} end -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}{table(rules)}{end}{rest.partition(end)[2]}"
    return text


def main() -> None:
    """Write the page."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    path.write_text(page(path.read_text()))


def _short(value: object) -> str:
    return "a list" if isinstance(value, list) else shown(value)


if __name__ == "__main__":
    main()
