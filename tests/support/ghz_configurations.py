"""What stands in load/ghz: the configuration of each public method, by profile, with a job that there is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

GHZ = Path(__file__).parents[2] / "load" / "ghz"
PROFILES = ("smoke", "steady", "step")


def configurations(profile: str, *, job_id: str = "JOB_ID") -> Mapping[str, Mapping[str, Any]]:
    """By method, without its service; as load/ghz/run.sh gives them to ghz."""
    files = sorted((GHZ / profile).glob("*.json"))
    read = [json.loads(file.read_text(encoding="utf-8").replace('"JOB_ID"', json.dumps(job_id))) for file in files]
    return {config["call"].rpartition("/")[2]: config for config in read}
