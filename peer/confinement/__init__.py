"""What a process of ours may still do if somebody else's numbers have taken it over."""
