"""What one process has held at each sample: memory and open files."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression, median


@dataclass
class ProcessWeight:
    """Samples, oldest first. `rss` in bytes, of the process alone; `at` in seconds of a monotonic clock."""

    rss: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    at: list[float] = field(default_factory=list)

    def sample(self, pid: int) -> None:
        """Add a sample of a process that runs."""
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        self.rss.append(pages * os.sysconf("SC_PAGE_SIZE"))
        self.files.append(len(os.listdir(f"/proc/{pid}/fd")))
        self.at.append(time.monotonic())

    def early_and_late(self, samples: list[int], warm_up_share: float) -> tuple[float, float]:
        """Return medians of the quarter after the warm-up and of the last quarter."""
        quarter = max(1, len(samples) // 4)
        start = int(len(samples) * warm_up_share)
        return median(samples[start : start + quarter]), median(samples[-quarter:])

    def after(self, seconds: float) -> ProcessWeight:
        """Return the samples from so many seconds after the first on."""
        first = next(number for number, at in enumerate(self.at) if at >= self.at[0] + seconds)
        return ProcessWeight(self.rss[first:], self.files[first:], self.at[first:])

    @property
    def bytes_a_minute(self) -> float:
        """How fast the memory grows, by the line through all samples."""
        return 60 * linear_regression(self.at, self.rss).slope if len(self.at) > 1 else 0.0

    @property
    def growth(self) -> float:
        """By which share the memory has grown, by the medians of the first and the last quarter."""
        early, late = self.early_and_late(self.rss, 0.0)
        return late / early - 1

    @property
    def more_files(self) -> float:
        """How many more files are open than in the beginning, by the same medians."""
        early, late = self.early_and_late(self.files, 0.0)
        return late - early
