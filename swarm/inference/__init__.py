"""What a client of a served model needs: its servers' records, routes through them, and sessions. No torch."""
