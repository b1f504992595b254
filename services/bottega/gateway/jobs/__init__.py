"""Jobs of the gateway.

job has their states, repository and store keep them, write_queue writes their changes in order, and storage looks after
the disk. This package imports no other package of the gateway.
"""
