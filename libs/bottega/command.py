"""The script `bottega`, which says which package is missing if the command cannot be imported."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command, or exit with a message if the SDK was installed without it."""
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
