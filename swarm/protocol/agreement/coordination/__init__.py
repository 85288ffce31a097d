"""The coordinator: it begins the group, vouches for heads, and starts new terms."""
