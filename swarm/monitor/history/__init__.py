"""What a monitor remembers, in a file of its own, and the page that it publishes without a server."""
