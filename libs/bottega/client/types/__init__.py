"""Values of the SDK (options, events, pictures, LoRAs, ControlNets, jobs) and how they become the contract's messages
and come back; and the results of checks.
"""
