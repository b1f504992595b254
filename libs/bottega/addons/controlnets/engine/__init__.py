"""ControlNets in an engine: finding, loading and caching them, and the sessions that compute residuals with them.

A session is the use of one ControlNet by one request. ControlNet servers use this package, and so do workers that run
ControlNets themselves.
"""

from bottega.addons.controlnets.engine.local import ControlNetCache, ControlNetLease, LocalControlNets, residual_at
from bottega.addons.controlnets.engine.network import (
    ControlNetSource,
    LoadedControlNet,
    check_weights,
    find_controlnet,
    load_controlnet,
)
from bottega.addons.controlnets.engine.sessions import (
    ControlImages,
    ControlRow,
    ControlSession,
    computes_one_session,
    process_image,
    run_group,
    stream_group,
)
from bottega.model_files.control_layout import ControlLayout, base_layout, read_base_layout

__all__ = [
    "ControlImages",
    "ControlLayout",
    "LoadedControlNet",
    "ControlNetCache",
    "ControlNetSource",
    "ControlRow",
    "ControlSession",
    "ControlNetLease",
    "LocalControlNets",
    "base_layout",
    "check_weights",
    "computes_one_session",
    "find_controlnet",
    "load_controlnet",
    "process_image",
    "read_base_layout",
    "residual_at",
    "run_group",
    "stream_group",
]
