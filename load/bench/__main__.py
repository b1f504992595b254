"""List the benches with their questions: `make benches`."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path


def main() -> None:
    """Print each bench's name and question, which is the first line of its docstring."""
    for path in sorted(Path(__file__).parent.glob("*.py")):
        source = path.read_text(encoding="utf-8")
        if "\nBENCH = Bench(" in source:
            question = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
            name = f"{path.stem.replace('_', '-'):<18} "
            print(textwrap.fill(question, 120, initial_indent=name, subsequent_indent=" " * len(name)))


if __name__ == "__main__":
    main()
