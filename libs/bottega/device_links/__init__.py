"""Links between devices: what carries the tensors of bottega.transport's links in memory of devices.

Two backends, behind the interface of bottega.transport.channel.backend, whose frames go over a connection of the link's
own, with the headers of messages, so that nothing is parsed in memory of a device:

- slot_pool.py, within a host: the sender's slots are memory of its device that the receiver maps (CUDA IPC), and copies
  from into slots of its own.
- process_group.py, between devices of one host or two: a group of torch.distributed of two processes for each
  direction of each link (NCCL; Gloo moves memory of the host, for tests, and where the configuration says so).

A link has one of them where both ends have a device that can (`device_links`), and where bytes have come through in
both directions when it was opened; else it goes through memory of the host or TCP, as links without devices do.
"""

from bottega.device_links.devices import device_links
from bottega.device_links.streams import beside, keep_until_used, mark
from bottega.device_links.tensors import DeviceTensor

__all__ = ["DeviceTensor", "beside", "device_links", "keep_until_used", "mark"]
