"""Recorded activations of a worker's engine: in its own memory, and loaded from the fleet's activation stores."""

from bottega.addons.edits.worker.store_activations import ActivationSettings, StoreActivations
from bottega.addons.edits.worker.store_link import ActivationLinkSettings

__all__ = ["ActivationLinkSettings", "ActivationSettings", "StoreActivations"]
