"""The arithmetic of a worker process: inner optimizers, training loops, stages, devices."""
