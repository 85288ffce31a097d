"""Groups of K peers in one process, exchanging in memory instead of over a network.

`StrategyGroup` drives the strategies that the network runs, through their codecs, gate and slices, in fp32. `Group`
drives the papers' algorithms, in any dtype: it is the reference that the strategies are tested against, and the only
driver of gossip and of PowerSGD with two exchanges a step. Both use the same formulas (`optim.algorithms`).
"""

from optim.simulate.group import ALGORITHMS, Group, layout_of
from optim.simulate.rounds import Rounds, encoded
from optim.simulate.strategy_group import Overlap, StrategyGroup

__all__ = ["ALGORITHMS", "Group", "Overlap", "Rounds", "StrategyGroup", "encoded", "layout_of"]
