"""The worker: serves one base model with an engine process, codec processes, and a front process that serves gRPC."""
