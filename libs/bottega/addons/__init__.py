"""The features beside plain pictures, a package each: all of a feature's code but its server.

    wire        messages between processes, and rules of requests
    planning    decisions, without torch
    gateway     the gateway's AddOn
    front       RPCs and parameters in the front of a worker
    worker      links from a worker's engine to the feature's services
    engine      what it adds to the engine
    client      methods of the SDK and subcommands of `bottega`

Only `worker` and `engine` may import torch. Packages of features do not import each other. `interface` has what they
and the services that load them agree on.
"""
