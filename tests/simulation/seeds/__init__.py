"""Schedules that broke an invariant once, and what makes them small."""
