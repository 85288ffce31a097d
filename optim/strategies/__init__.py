"""How a run's groups agree on weights: one recipe a method, all on the round engine of `swarm`."""
