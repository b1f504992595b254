"""An authority, and certificates of it, for tests."""

from __future__ import annotations

from pathlib import Path

from bottega.rpc.channel import Channels
from bottega.rpc.security.caller import identity_from
from bottega.rpc.security.certificates import CertificateFolder
from bottega.rpc.security.tls import TlsConfig, TlsFiles


class Authority:
    """In a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = CertificateFolder(folder)
        self.folder.make_authority(days=100)

    def issue(self, name: str, *, days: int = 5) -> TlsConfig:
        """The files of ROLE/NAME, new ones each time. days: 0 has expired."""
        identity = identity_from(name)
        assert identity is not None
        paths = self.folder.issue(identity, days=days)
        return TlsConfig(
            certificate=str(paths.certificate), key=str(paths.key), authority=str(self.folder.authority_path)
        )

    def channels(self, name: str, *, days: int = 5) -> Channels:
        """What opens channels in the name of ROLE/NAME."""
        return Channels(TlsFiles(self.issue(name, days=days)))
