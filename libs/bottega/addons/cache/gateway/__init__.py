"""The approximate cache in the gateway: which requests may use it, and how many steps they are expected to skip."""
