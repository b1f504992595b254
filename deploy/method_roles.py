"""Writes the table of roles and methods into the page of bottega.rpc.security: `python deploy/method_roles.py`."""

from __future__ import annotations

import sys
from pathlib import Path

from bottega.rpc.security.caller import METHOD_ROLES, Role

PAGE = Path(__file__).resolve().parent.parent / "libs/bottega/rpc/security/README.md"
_BEGIN, _END = "<!-- roles begin -->\n", "<!-- roles end -->"


def table() -> str:
    """Return a table of all methods; methods of a service that the same roles may call are one row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for path, allowed in METHOD_ROLES.items():
        service, _, method = path.rpartition(".")[2].partition("/")
        roles = ", ".join(role for role in Role if role in allowed and role is not Role.LOCAL)
        rows.setdefault((service, roles), []).append(method)
    lines = ["| service | methods | roles |", "|---|---|---|"]
    lines += [f"| {service} | {', '.join(methods)} | {roles} |" for (service, roles), methods in rows.items()]
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
