"""Computing a contribution: the interface to compute workers, and the encoding of their updates."""
