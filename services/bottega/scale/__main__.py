"""Starts a scaler: `python -m bottega.scale [--config FILE]`, or `bottega scale --config FILE`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from bottega import kinds
from bottega.client.suite.plan import ProcessPlan
from bottega.errors import ConfigError
from bottega.rpc.boot import ServiceHooks, boot
from bottega.rpc.server import Server
from bottega.scale.config import ScaleConfig
from bottega.scale.service import Scaler
from bottega.scale.units import ProcessUnits, SystemdUnits, Units
from bottega.state_folder import state_folder

# As sd_booted(3) looks for it.
_SYSTEMD = Path("/run/systemd/system")


def main() -> int:
    """Run the service and return the exit status."""
    return boot(kinds.SCALE, ScaleConfig, _lifespan, description="Bottega's scaler")


@contextlib.asynccontextmanager
async def _lifespan(config: ScaleConfig) -> AsyncIterator[ServiceHooks]:
    server = Server(kinds.SCALE, config.server)
    scaler = Scaler(config, server, _units(config))
    yield ServiceHooks(server=server, warm_up=scaler.start, failed=scaler.failed, shut_down=scaler.stop)


def _units(config: ScaleConfig) -> Units:
    if config.manager == "systemd":
        if not _SYSTEMD.is_dir():
            raise ConfigError("systemd does not run on this host: set manager: processes")
        return SystemdUnits()
    plans = {
        pool.unit(instance): ProcessPlan(
            name=f"{pool.kind}-{instance}",
            argv=(
                sys.executable,
                "-m",
                f"bottega.{pool.service}",
                "--config",
                str(config.file_of(pool, instance)),
                "--stop-with-stdin",
            ),
            # Without it the threads of two torch processes on few cores starve each other, up to 80-fold.
            environment={"OMP_WAIT_POLICY": "PASSIVE"},
        )
        for pool in config.pools
        for instance in pool.instances
    }
    logs = state_folder() / kinds.SCALE / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    return ProcessUnits(plans, logs)


if __name__ == "__main__":
    sys.exit(main())
