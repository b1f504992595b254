"""What was measured of ControlNets, by their hash: a server's profiles, remembered in a file. Knows no names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from google.protobuf import json_format

from bottega import rules
from bottega.controlnet.json_file import read_record, unusable, write_record
from bottega.v1.controlnet_pb2 import ResidualProfile

# ControlNets; those that were profiled first are forgotten first. Several times what a server hosts.
_MOST = 4096


class ProfileStore:
    """Its calls may wait for the disk. Raises ConfigError where the file cannot be used."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._profiles = {digest: tuple(self._checked(values)) for digest, values in read_record(file).items()}

    def of(self, digest: str) -> Sequence[ResidualProfile]:
        """Of the ControlNet with that hash."""
        return self._profiles.get(digest, ())

    def set(self, digest: str, profile: ResidualProfile) -> None:
        """Notes one in the place of what there is for its base model.

        Raises StorageUnavailable, and then it is not noted.
        """
        others = [each for each in self.of(digest) if each.model_hash != profile.model_hash]
        profiles = {key: value for key, value in self._profiles.items() if key != digest}
        profiles[digest] = tuple([*others, profile][-rules.MAX_PROFILES :])
        while len(profiles) > _MOST:
            del profiles[next(iter(profiles))]
        write_record(self._file, {key: [*map(_values, value)] for key, value in profiles.items()})
        self._profiles = profiles

    def _checked(self, values: object) -> Iterator[ResidualProfile]:
        for value in values if isinstance(values, list) else [values]:
            if not isinstance(value, dict):
                raise unusable(self._file, "it is no object of hashes and profiles")
            try:
                profile = json_format.ParseDict(value, ResidualProfile())
            except json_format.ParseError as error:
                raise unusable(self._file, str(error)) from None
            for broken in rules.check_profile("profile", profile):
                raise unusable(self._file, f"{broken.field} {broken.description}")
            yield profile


def _values(profile: ResidualProfile) -> dict[str, object]:
    return json_format.MessageToDict(profile, preserving_proto_field_name=True)
