"""Flows: long-lived streams of small messages between two peers."""
