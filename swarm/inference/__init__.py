"""Serving: block servers, sessions that go through them, and what a client needs. Clients load no torch."""
