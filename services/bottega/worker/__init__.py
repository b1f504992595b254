"""The worker: one base model, its engine process, its codec processes, and the front that joins them."""
