"""A peer's footprint on its machine, by arithmetic: bytes on device, host and disk, work, and the pace of rounds.

Everything that compares a run with a machine reads its figures here: `peer join`, `peer doctor`, `peer plan`, the
placement of stages. Nothing in here needs torch.
"""
