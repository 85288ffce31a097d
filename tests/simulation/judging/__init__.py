"""The judge and the faults of the simulator, tested by hand: each check fires, and each fault happens."""
