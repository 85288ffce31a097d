"""The driver of one commit: plan, compute, submit, exchange, merge, vote."""
