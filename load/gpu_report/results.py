"""What parts have found so far: a file for each in a folder, good for one machine, one code and one size."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from load.gpu_report.figures import Figure

Status = Literal["measured", "left out", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one part. seconds: that it took. why: it was left out or failed; empty where it was measured.

    setting: on what machine, with which versions and which code.
    """

    part: str
    status: Status
    seconds: float
    setting: Mapping[str, str]
    figures: Sequence[Figure] = ()
    why: str = ""


class Results:
    """Outcomes in a folder, which is made. Those of another setting are not seen."""

    def __init__(self, folder: Path, setting: Mapping[str, str]) -> None:
        self.folder = folder
        self.setting = dict(setting)
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, part: str) -> Outcome | None:
        """What is known of a part in this setting; None where it has not run to its end."""
        try:
            said = json.loads(self._path(part).read_text(encoding="utf-8"))
            figures = tuple(map(Figure.from_json, said.pop("figures")))
            outcome = Outcome(figures=figures, **said)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError):
            return None  # cut off while it was written, or of an earlier report
        return outcome if outcome.setting == self.setting else None

    def put(self, outcome: Outcome) -> None:
        """Keeps it; all of it or nothing."""
        said = {
            "part": outcome.part,
            "status": outcome.status,
            "seconds": round(outcome.seconds, 1),
            "setting": dict(outcome.setting),
            "figures": [figure.to_json() for figure in outcome.figures],
            "why": outcome.why,
        }
        path = self._path(outcome.part)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(said, indent=1), encoding="utf-8")
        partial.replace(path)

    def forget(self, part: str) -> None:
        """Nothing is known of it from now on."""
        self._path(part).unlink(missing_ok=True)

    def _path(self, part: str) -> Path:
        return self.folder / f"{part}.json"
