"""What a terminal shows: the live table, the cards, and the figures of a served model."""
