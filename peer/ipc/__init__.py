"""What both ends of a worker's socket share: messages, frames, shared memory."""
