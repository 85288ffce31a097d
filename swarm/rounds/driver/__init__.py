"""What connects a node of the agreement to sockets, timers, files, the trainer and the weights."""
