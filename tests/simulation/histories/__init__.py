"""Histories that real drivers have left, judged by the same invariants as those of the simulated core."""
