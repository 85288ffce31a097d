"""Long schedules of churn: machines fail and are repaired for hours, an operator looks after the run, and all
invariants are checked as in the short ones. `benchmarks/agreement/availability.py` measures how much of the time makes
progress."""
