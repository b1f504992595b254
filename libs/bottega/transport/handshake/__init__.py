"""How two processes find and prove each other: offers, listening sockets, credentials, and the mutual proof that opens
a link.
"""
