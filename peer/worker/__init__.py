"""Worker processes: their entry points, and the handles that the network process holds on them."""
