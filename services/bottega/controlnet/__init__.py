"""The ControlNet service: ControlNets on a server of their own, in parallel with the base model, shared by workers.

The front (this package's asyncio part) speaks gRPC, joins the fleet and remembers what is hosted; the engine process
owns the device. Links of workers end in the engine, so that no tensor passes through the front.
"""
