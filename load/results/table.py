"""The table of the newest results into load/README.md: `python -m load.results.table`.

Each bench has one file, NAME.json, which `make bench-NAME RECORD="what else ran"` writes. Git's history has earlier
runs.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from load.bench.framework import RESULTS, missed

README = RESULTS.parent / "README.md"
_BEGIN = "<!-- begin: results, written by python -m load.results.table -->\n"
_END = "<!-- end: results -->\n"
# The name that a figure has in its bench's JSON object, as in "a request (ratio)".
_KEY = re.compile(r" \(\w+\)$")


def table(folder: Path = RESULTS) -> str:
    """Return the newest figures that have a bar as Markdown."""
    lines = ["| bench and figures | measured | wanted |\n", "|---|---|---|\n"]
    for path in sorted(folder.glob("*.json")):
        run = json.loads(path.read_text())
        rows = [row for row in run["rows"] if row["wanted"]]
        if not rows:
            continue
        lines.append(f"| **{run['bench']}**: {run['date']} |\n")
        lines += [f"| {_KEY.sub('', row['what'])} | {_shown(row)} | {_wanted(row)} |\n" for row in rows]
    return "".join(lines)


def written(text: str, results: str) -> str:
    """Return a page with `results` between its two marks."""
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}{results}{_END}{after}"


def _wanted(row: dict[str, Any]) -> str:
    return str(row["wanted"]).replace("at least ", "≥ ").replace("at most ", "≤ ")


def _shown(row: dict[str, Any]) -> str:
    return f"**{row['measured']}, missed**" if missed(row["measured"], row["wanted"]) else str(row["measured"])


if __name__ == "__main__":
    README.write_text(written(README.read_text(), table()))
