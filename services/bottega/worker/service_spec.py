"""The worker's entry in the manifest of services."""

from __future__ import annotations

from bottega.manifest import ServiceOption, ServiceSpec, SuiteSettings, UnitSettings

_COUNT = ServiceOption(name="workers", help="Worker processes of each model.", default=1, least=1, per_model=True)


def _configure(suite: SuiteSettings, name: str) -> dict[str, object]:
    # Imported here because the manifest does not need it.
    from bottega.model_files.own_files import controlnets_share

    workers = suite.options[_COUNT.name]
    model = suite.models[int(name.rpartition("-")[2]) % len(suite.models)]
    folders = [model.folder for model in suite.models]
    # All workers and ControlNet servers of the suite use one device.
    memory_share = (1 - controlnets_share(folders, suite.options.get("controlnet_servers", 0))) / workers
    return {
        "name": name,
        "gateway": suite.fleet_address,
        "server": suite.server,
        "codec_idle_s": 300.0,
        "engine": {
            "model": model.source,
            "model_name": model.name,
            "device": suite.device,
            "dtype": suite.dtype,
            "threads": suite.threads_of(workers),
            "device_memory_share": memory_share,
            **({"vae": {"folder": suite.vae}} if suite.vae else {}),
        },
    }


SPEC = ServiceSpec(
    kind="worker",
    title="worker",
    module="bottega.worker",
    fork_after_importing="bottega.worker.__main__",
    configure=_configure,
    config="bottega.worker.config:WorkerConfig",
    config_check="bottega.worker.config:check_model",
    example={"name": "miniature"},
    count=_COUNT,
    requires=("accelerate", "diffusers", "safetensors", "torch", "transformers"),
    install="bottega-services[worker]",
    unit=UnitSettings(
        on_device=True,
        links=True,
        reads_models=True,
        start_s=180,  # above start_stall_s (120 s); the worker asks for more time with every sign of progress
    ),
)
