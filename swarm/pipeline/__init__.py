"""Pipelines over the network: micro-batches through one live replica of each stage (SWARM, arXiv 2301.11913)."""
