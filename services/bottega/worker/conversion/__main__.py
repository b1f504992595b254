"""The program that converts a file: `python -m bottega.worker.conversion FILE FOLDER FAMILY PREDICTION_TYPE VAE PARTS`.

bottega.model_files.importing starts it. It prints one JSON object per line: `{"part": ..., "size_bytes": ...}` before
it converts a part, and the result at the end. After an error it prints a sentence to stderr and exits with status 1.
It stops when its stdin is closed, so it does not outlive its parent process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

from bottega.errors import ConfigError
from bottega.worker.conversion.folder import convert_file

_STDIN = 0


def main(arguments: list[str]) -> int:
    """Run the command and return its exit status."""
    file, folder, family, prediction_type, vae, parts = (*arguments, "", "", "", "")[:6]
    # Ends by an exception, so that what is half written is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        done = convert_file(
            Path(file),
            Path(folder),
            family,
            prediction_type,
            Path(vae) if vae else None,
            parts=Path(parts) if parts else None,
            on_part=_say_part,
        )
    except ConfigError as error:
        print(error.message, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    source = done.source
    _say(
        is_new=done.is_new,
        kind=source.kind.value,
        family=source.family,
        title=source.title,
        prediction_type=source.prediction_type,
        prediction_source=source.prediction_source,
        prediction_is_guess=source.prediction_is_guess,
    )
    return 0


def _end_with_stdin() -> None:
    while os.read(_STDIN, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _say_part(part: str, size_bytes: int) -> None:
    _say(part=part, size_bytes=size_bytes)


def _say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
