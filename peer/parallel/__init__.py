"""Several devices of one machine as one group of ranks: DDP, FSDP2 and TP of one model, and its flat vector in
pieces."""
