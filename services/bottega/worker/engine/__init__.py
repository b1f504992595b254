"""The worker's engine process: it loads the model, draws, and speaks engine.proto over a pipe."""
