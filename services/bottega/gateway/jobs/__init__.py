"""Jobs of the gateway: their states (job), where they are kept (repository, store), in what order their changes are
written (write_queue), and the disk under all of it (storage). Imports no other package of the gateway.
"""
