"""LoRA stores, as people meet them."""

from __future__ import annotations

from bottega import kinds
from bottega.client.addons.addon import ClientAddOn

ADD_ON = ClientAddOn(kind=kinds.LORAS, title="LoRA store", hosted_title="LoRAs")
