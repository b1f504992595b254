"""The manifest's entry of the approximate cache."""

from __future__ import annotations

from bottega.manifest import ServiceSpec, SuiteSettings, UnitSettings

_PROFILE = "cache_profile.json"
"""Name of the file with a measured profile, in the folder of a model."""


def _configure(suite: SuiteSettings, name: str) -> dict[str, object]:
    profiles = [model.folder / _PROFILE for model in suite.models]
    return {
        "name": name,
        "gateway": suite.fleet_address,
        "server": suite.server,
        "folder": str(suite.state / "cache"),
        "profiles": [str(profile) for profile in profiles if profile.is_file()],
    }


SPEC = ServiceSpec(
    kind="cache",
    title="approximate cache",
    module="bottega.cache",
    fork_after_importing="bottega.rpc.store_server",  # NumPy, which the cache imports, starts threads
    configure=_configure,
    config="bottega.cache.config:CacheConfig",
    config_check="bottega.cache.profiles:check_configured",
    example={"name": "cache"},
    add_on="bottega.addons.cache.gateway:create",
    engine_add_on="bottega.addons.cache.worker.addon:create",
    front_add_on="bottega.addons.cache.front:CacheFront",
    requires=("faiss-cpu", "numpy", "scikit-learn"),
    install="bottega-services[cache]",
    unit=UnitSettings(links=True, reads_models=True),
)
