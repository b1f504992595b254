"""Jobs of the gateway.

job has their states, repository and store keep them, and storage looks after the disk and writes their changes in
order. This package imports no other package of the gateway.
"""
