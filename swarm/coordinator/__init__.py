"""The run's owner: it creates the run, starts and regroups its groups, and bans peers."""
