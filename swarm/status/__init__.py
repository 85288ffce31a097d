"""How a run or a served model is: one reading, the state that follows from it, the verdict on it, alerts. No torch."""
