"""The worker: it serves one base model, with a front process for gRPC, an engine process and codec processes."""
