"""The ControlNet service: a server that runs ControlNets in parallel with the base model, shared by workers.

The front process (this package's asyncio code) serves gRPC, joins the fleet and remembers which ControlNets are hosted.
The engine process owns the device. Workers' tensor connections end in the engine, so no tensor passes through the front
process.

ControlNets are the only kind of adapter that it hosts now. Another kind that runs beside the base model, such as
IP-Adapter's image encoder or T2I-Adapter, can reuse this, and has to bring the rest:

- Hosting, loading, eviction, prefetching, digests and metrics (model_registry.py, ControlNetCache, the catalogue) need
  an adapter's name, folder, size and digest, and a function that loads it. `find_controlnet` checks a folder's
  `_class_name`; another kind gets a function beside it.
- A session begins with a picture and the conditions of both halves of guidance, and computes once what stays the same
  at every step: `ControlSession.embedded`. A kind that does not depend on latents does all of its work there.
- A step is a set of batch rows for `BatchExecutor`. Rows with equal `StepRequest.key` share a forward pass, which is
  `stream_group`. It yields tensors of all rows, point by point, at scale 1. Each row's own scales are applied when they
  are written into the connection's buffer.
- An answer's tensors are sent in the order in which the base model needs them, and announced one by one
  (worker_link.py): those of a transformer while its later blocks run. Their number and shapes follow from
  `ControlLayout.shapes`, which worker and server compute alike. Another kind brings its own layout, and adds its points
  to the worker's backbone (`Block.needs`).
- Connections, leases, refusals, pings and failover (worker_link.py, and the worker's side) identify sessions, rows and
  layouts by number, whatever is computed.
"""
