"""Whether a run or a served model is healthy, as a client sees it: as a page, JSON and metrics. No torch."""
