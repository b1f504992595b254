"""The optional features of a request (LoRAs, ControlNets, cached latents, edits): one package each.

A package has all code of its feature except for the feature's own service, in these subpackages:

wire        messages between processes, and rules that validate requests
planning    decisions of the gateway, without torch
gateway     the gateway's AddOn
front       RPCs and parameters in the front process of a worker
worker      connections from a worker's engine process to the feature's services
engine      what the feature adds to the engine
client      methods of the SDK and subcommands of `bottega`

Only `worker` and `engine` may import torch. Packages of features do not import each other. `interface` has the types
that the features share with the services that load them.
"""
