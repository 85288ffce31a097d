"""Which peer takes which stage: cuts of the model, load, choices and moves."""
