"""The worker's engine process: it loads the model, draws images, and exchanges engine.proto messages over a pipe."""
