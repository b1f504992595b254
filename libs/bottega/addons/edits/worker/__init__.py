"""Recorded activations of a worker's engine: in its memory, and behind that in the fleet's stores, over links."""

from bottega.worker.activations.store_activations import ActivationSettings, StoreActivations
from bottega.worker.activations.store_link import ActivationLinkSettings

__all__ = ["ActivationLinkSettings", "ActivationSettings", "StoreActivations"]
