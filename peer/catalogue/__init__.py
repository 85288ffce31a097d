"""The catalogue of events that have readers: their fields, which of them other peers are told, and their words."""
