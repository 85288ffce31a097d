"""How a run's group agrees on weights: one strategy a method; the round engine of `swarm` drives them."""
