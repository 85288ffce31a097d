"""Read-only access to a run: status and download, without taking part."""
