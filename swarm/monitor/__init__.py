"""Whether a run or a served model is healthy, as a client sees it: empty until the monitor is built. No torch."""
