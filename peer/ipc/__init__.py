"""Common parts of both ends of a worker's socket: messages, frames, shared memory."""
