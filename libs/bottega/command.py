"""The script `bottega`: says what is missing where the command itself cannot be imported."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command, or end with a sentence where the SDK was installed without it."""
    try:
        from bottega.client.cli import main as command
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("bottega.client"):
            raise
        sys.exit(_missing(error.name))
    command()


def _missing(module: str) -> str:
    if module.startswith("bottega"):
        return f"bottega: {module} is not installed: pip install bottega-protos"
    return f"bottega: {module} is not installed: pip install 'bottega-libs[client]'"
