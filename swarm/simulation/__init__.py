"""Pipelines under virtual time, by the very policies of the network: wiring, rebalancing, shares of a merge.

`fluid`: stages as flows, for up to 10,000 peers. `pipeline`: every micro-batch, for a few hundred. `trace`: who is
there when.
"""
