"""The manifest of services: each is one line of `services.txt`, and a `ServiceSpec` in its own package."""

from bottega.manifest.reading import MANIFEST, VARIABLE, load_object, missing_packages, options_of, read_services
from bottega.manifest.spec import ServiceOption, ServiceSpec, SuiteSettings, UnitSettings

__all__ = [
    "ServiceSpec",
    "ServiceOption",
    "SuiteSettings",
    "UnitSettings",
    "read_services",
    "options_of",
    "load_object",
    "missing_packages",
    "MANIFEST",
    "VARIABLE",
]
