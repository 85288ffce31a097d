"""The second layer: the real driver with real tensors under a virtual clock, judged by the invariants of the first."""
