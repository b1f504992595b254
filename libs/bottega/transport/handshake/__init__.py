"""How two processes find each other and prove their identity: offers, listening sockets, credentials, mutual proof."""
