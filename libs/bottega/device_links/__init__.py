"""Links between devices: backends that move the tensors of bottega.transport's links between device memories.

The two backends implement bottega.transport.channel.backend. Frames and message headers go over a socket connection of
each link, so nothing is parsed in device memory:

- shared_memory.py, within a host: the receiver maps the sender's slots in device memory (CUDA IPC) and copies from them
  into its own slots.
- process_group.py, between devices of one host or two: each direction of each link has a torch.distributed group of two
  processes. NCCL is the default; Gloo, which moves host memory, is for tests or on request.

A link uses one of them if both ends have a device that supports it (`device_links`) and bytes passed in both directions
when the link was opened. Otherwise it uses shared host memory or TCP, as links without devices do.
"""
