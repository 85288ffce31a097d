"""stub"""
from pathlib import Path
def write_table(folder: Path, schedules: int, workers: int) -> int:
    return 0
