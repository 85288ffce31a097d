"""The status of a run or a served model, read again and again: as a page, JSON and metrics. No torch."""
