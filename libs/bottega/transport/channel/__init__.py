"""One direction of a link: sender and receiver, the frames that they exchange, credit and limits, and the interface
that backends implement.
"""
