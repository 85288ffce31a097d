"""Pipelines under virtual time, with the network's own policies: routing, rebalancing, shares of a merge.

`fluid`: stages as flows, for up to 10,000 peers. `pipeline`: every micro-batch, for a few hundred. `trace`: which peer
is there when.
"""
