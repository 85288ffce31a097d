"""The quickstart: a cluster of child processes, its script of faults, and the report."""
