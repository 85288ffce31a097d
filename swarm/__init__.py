"""Many machines acting as one: runs, rounds, state, pipelines and the coordinator."""
