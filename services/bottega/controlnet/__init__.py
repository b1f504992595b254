"""The ControlNet service: ControlNets on a server of their own, in parallel with the base model, shared by workers.

The front (this package's asyncio part) speaks gRPC, joins the fleet and remembers what is hosted; the engine process
owns the device. Links of workers end in the engine, so that no tensor passes through the front.

ControlNets are the one kind of adapter that it hosts now. What another kind that runs beside the base model, such as
IP-Adapter's image encoder or T2I-Adapter, finds here, and what it has to bring:

- Hosting, loading, eviction, prefetching, digests and metrics (model_registry.py, ControlNetCache, the catalogue) need
  an adapter's name, folder, bytes and digest, and a function that loads it. `find_controlnet` looks at a folder's
  `_class_name`: another kind is found beside it.
- A session begins with a picture and the conditions of both halves, and computes once what stays the same from step to
  step: `ControlSession.embedded`. A kind that depends on no latent does all of its work there.
- A step is rows for `BatchExecutor`: what rows share in one forward is `StepRequest.key`, the forward is `run_group`.
  It returns tensors by point and row at scale 1; a row's own scales are applied on their way into the link's slot.
- An answer's tensors go out in the order in which the base model needs them, each said to be ready by itself
  (link_responses.py). Number and shapes follow from `ControlLayout.shapes`, which worker and server compute alike;
  another kind brings its own layout, and its points to the worker's backbone (`Block.needs`), where they are added.
- Links, leases, refusals, pings and going on elsewhere (worker_link.py, the worker's side) carry sessions, rows and
  layouts by number, whatever is computed.
"""
