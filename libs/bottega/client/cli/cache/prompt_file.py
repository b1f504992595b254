"""Files with a prompt on each line, as people give them to commands."""

from __future__ import annotations

from pathlib import Path

from bottega.client.cli.terminal import fail

MOST_BYTES = 64 << 20


def read_prompt_file(file: Path) -> str:
    """Its text, of MOST_BYTES at most. Ends the command where there is none."""
    try:
        with file.open("rb") as opened:
            data = opened.read(MOST_BYTES + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        fail(f"{file} cannot be read: {error.strerror}", status=2)
    except UnicodeDecodeError:
        fail(f"{file} is no text in UTF-8", "Give a file with a prompt a line.", status=2)
    if len(data) > MOST_BYTES:
        fail(f"{file} has more than {MOST_BYTES >> 20} MiB", status=2)
    return text
