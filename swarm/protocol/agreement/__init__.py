"""The agreement of one group as a state machine without I/O: `node.AgreementNode.step(now, event) -> actions`."""
