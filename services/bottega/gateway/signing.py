"""The signer of finished pictures, which follows the files of its certificate as TLS follows its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from bottega.clocks import Clock
from bottega.content_credentials import PictureSigner
from bottega.errors import CannotSign, ConfigError
from bottega.gateway.config import GatewayConfig, read_signer
from bottega.rpc.security.private_files import FileState, file_state

_log = logging.getLogger(__name__)


class SigningFiles:
    """The signer of a gateway, read again when its files change. Any thread may use it.

    If new files cannot be used, the previous ones stay in use. The constructor raises ConfigError.
    """

    def __init__(self, config: GatewayConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()
        self._states = self._states_now()
        self._signer = read_signer(config)

    def expires_wall(self) -> float:
        """Return the Unix time in seconds at which the certificate expires; 0 if nothing is signed."""
        signer = self._current()
        return signer.expires_wall if signer else 0.0

    async def signer(self) -> PictureSigner | None:
        """Return the signer with the current files; None if nothing is signed."""
        return await asyncio.to_thread(self._current) if self._signer else None  # it may read files

    async def check(self) -> None:
        """Raise CannotSign if pictures are signed, and the certificate has expired."""
        signer = await self.signer()
        if signer is not None and signer.expires_wall <= self._clock.wall():
            raise CannotSign("the certificate that signs pictures has expired")

    def _current(self) -> PictureSigner | None:
        if self._signer is None:
            return None
        with self._lock:
            states = self._states_now()
            if states != self._states:
                self._states = states
                try:
                    self._signer = read_signer(self._config)
                except ConfigError as error:
                    _log.error("a new certificate for pictures cannot be used", extra={"text": error.message})
                else:
                    _log.info("the certificate for pictures was read again")
            return self._signer

    def _states_now(self) -> Sequence[FileState]:
        files = self._config.signing
        return [file_state(Path(path).expanduser()) for path in (files.certificate, files.key)]
