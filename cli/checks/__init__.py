"""The checks of `peer doctor`: this machine, and its way to a run."""
