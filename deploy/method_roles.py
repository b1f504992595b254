"""Writes the table of roles and methods into the page of bottega.rpc.security: `python deploy/method_roles.py`."""

from __future__ import annotations

import sys
from pathlib import Path

from bottega.rpc.security.caller import Role
from bottega.rpc.security.method_roles import METHOD_ROLES

PAGE = Path(__file__).resolve().parent.parent / "libs/bottega/rpc/security/README.md"
_BEGIN, _END = "<!-- roles begin -->\n", "<!-- roles end -->"


def table() -> str:
    """Return a table with a row for each method and a column for each role."""
    roles = [role for role in Role if role is not Role.LOCAL]
    lines = [f"| method | {' | '.join(roles)} |", f"|---|{'---|' * len(roles)}"]
    for method, allowed in METHOD_ROLES.items():
        cells = " | ".join("yes" if role in allowed else "" for role in roles)
        lines.append(f"| {method.rpartition('.')[2]} | {cells} |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """Return the page `text` with the current table."""
    before, _, rest = text.partition(_BEGIN)
    return f"{before}{_BEGIN}{table()}{_END}{rest.partition(_END)[2]}"


def main() -> None:
    """Write the page."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    path.write_text(page(path.read_text()))


if __name__ == "__main__":
    main()
