"""One direction of a link: sender, receiver, frames, credit, limits, and the interface of backends."""
