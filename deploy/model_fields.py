"""Writes the tables of model folders' fields into the page of bottega.model_files.

Run it with `python deploy/model_fields.py [PAGE]`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bottega.model_files.configuration_rules import INDEX_RULES, TEXT_ENCODER_RULES
from bottega.model_files.field_rules import ANY, FieldRule, shown
from bottega.model_files.scheduler_rules import SAMPLER_CLASSES, SCHEDULER_RULES, UNSERVED_CLASSES
from bottega.model_files.transformer_rules import SD3_RULES, T5_RULES
from bottega.model_files.unet_rules import UNET_RULES
from bottega.model_files.vae_rules import VAE_RULES
from bottega.schedules import Schedule
from bottega.v1.generation_pb2 import Sampler
from bottega.worker.image_codec import SAMPLER_TITLES

PAGE = Path(__file__).resolve().parent.parent / "libs/bottega/model_files/README.md"
TABLES: Mapping[str, Sequence[FieldRule]] = {
    "index": INDEX_RULES,
    "unet": UNET_RULES,
    "transformer": SD3_RULES,
    "vae": VAE_RULES,
    "text_encoder": TEXT_ENCODER_RULES,
    "text_encoder_3": T5_RULES,
}
"""Tables of the page about parts with one class, by the name in their marks."""
_SUFFIX = "Scheduler"
# The page says once that quantized weights are refused in all parts.
_OF_ALL_PARTS = frozenset({"quantization_config"})


def table(rules: Sequence[FieldRule]) -> str:
    """Return a table of the rules that refuse what Diffusers draws with, fields of equal rules in one row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for rule in filter(_refuses_more, rules):
        rows.setdefault((rule.values.text, rule.why), []).append(f"`{rule.name}`{_default(rule)}")
    cells = [("fields (default)", "served", "why"), ("-",) * 3]
    cells += [(", ".join(fields), values, why) for (values, why), fields in rows.items()]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def scheduler_table() -> str:
    """Return a table of the schedulers' rules that refuse what Diffusers draws with, by sampler."""
    served: dict[str, dict[tuple[str, str], list[str]]] = {}
    for sampler, name in SAMPLER_CLASSES.items():
        for rule in filter(_refuses_more, SCHEDULER_RULES[name]):
            served.setdefault(rule.name, {}).setdefault((rule.values.text, rule.why), []).append(sampler)
    rows: dict[tuple[str, str, str], list[str]] = {}
    for field, samplers in sorted(served.items()):
        for (values, why), names in samplers.items():
            of = ", ".join(names) if len(samplers) > 1 or len(names) == 1 else "all"
            rows.setdefault((of, values, why), []).append(f"`{field}`")
    cells = [("fields", "samplers", "served", "why"), ("-",) * 4]
    cells += [(", ".join(fields), *row) for row, fields in rows.items()]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def sampler_table() -> str:
    """Return a table of the samplers and their classes; classes that are refused for the same reason are one row."""
    rows = [("sampler", "Diffusers' ...Scheduler", "web UI", "schedule"), ("-",) * 4]
    for sampler, name in SAMPLER_CLASSES.items():
        title = SAMPLER_TITLES[Sampler.Value(f"SAMPLER_{sampler.upper()}")]
        rows.append((f"`{sampler}`", f"`{name.removesuffix(_SUFFIX)}`", title, _letters(sampler)))
    refused: dict[str, list[str]] = {}
    for name, why in UNSERVED_CLASSES.items():
        refused.setdefault(why, []).append(f"`{name.removesuffix(_SUFFIX)}`")
    rows += [(f"refused: {why}", ", ".join(names), "", "") for why, names in refused.items()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _letters(sampler: str) -> str:
    """Return the fields of a request's schedule that a sampler takes, by the letters of the page."""
    schedules = {
        "S": Schedule(use_beta_sigmas=True),
        "T": Schedule(timestep_spacing="trailing"),
        "F": Schedule(final_sigmas_type="zero"),
        "t": Schedule(timesteps=(1,)),
        "s": Schedule(sigmas=(1.0, 0.0)),
    }
    return " ".join(letter for letter, schedule in schedules.items() if not list(schedule.problems(sampler, {})))


def page(text: str) -> str:
    """Return the page `text` with the current tables."""
    tables = {name: table(rules) for name, rules in TABLES.items()}
    for name, rows in {**tables, "samplers": sampler_table(), "schedulers": scheduler_table()}.items():
        begin, end = f"<!-- {name} begin -->\n", f"<!-- {name} end -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}{rows}{end}{rest.partition(end)[2]}"
    return text


def main() -> None:
    """Write the page."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    path.write_text(page(path.read_text()))


def _refuses_more(rule: FieldRule) -> bool:
    """Return whether a rule of one part refuses values with which stock Diffusers draws: such rules say why."""
    return rule.values is not ANY and bool(rule.why) and rule.name not in _OF_ALL_PARTS


def _default(rule: FieldRule) -> str:
    return "" if isinstance(rule.default, list) else f" ({shown(rule.default)})"


if __name__ == "__main__":
    main()
