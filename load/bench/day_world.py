"""What both sides of a day draw with: a model, ControlNets, LoRAs and images, as files in one folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from load.replay.pictures import Pictures
from load.replay.requests import PlannedRequest

MODEL = "day"
"""What requests call it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """model: its folder. controlnets: folders by name. loras: files by name, as Diffusers saves them.

    pictures: that requests bring along, as the suite is sent them; images: the folder of the same ones for the server
    without a suite.
    """

    model: Path
    controlnets: Mapping[str, Path]
    loras: Mapping[str, Path]
    pictures: Pictures
    images: Path

    def template(self, rank: int) -> Path:
        """The file of what edits of this template edit."""
        return self._file(f"template-{rank}.png", lambda: self.pictures.template(rank))

    def control_image(self, request: PlannedRequest) -> Path:
        """The file of a request's control image."""
        return self._file(f"control-{request.seed}.png", lambda: self.pictures.control_image(request))

    def prepare(self, requests: Iterable[PlannedRequest]) -> None:
        """Draws and writes all images that these need, so that no request waits for one."""
        for request in requests:
            if request.template is not None:
                self.template(request.template)
            if request.controlnets:
                self.control_image(request)

    def _file(self, name: str, data: Callable[[], bytes]) -> Path:
        path = self.images / name
        if not path.exists():
            path.write_bytes(data())
        return path
