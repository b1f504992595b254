"""The opening of links: offers, listening sockets, credentials, and the mutual proof of two processes."""
