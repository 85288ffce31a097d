"""Where one more machine would help most, in words. Pure; what it rests on are claims."""

from __future__ import annotations

from swarm.status.state import MonitorState, StageState


def help_wanted(state: MonitorState) -> str:
    """Return one sentence; empty for what is over, or where nothing is known."""
    if state.verdict.level == "over":
        return ""
    if state.blocks:
        row = min(state.blocks, key=lambda row: row.servers)
        have = {0: "no server", 1: "one server"}.get(row.servers, f"{row.servers} servers")
        return (
            f"blocks {row.first} to {row.end - 1} have {have}: `peer serve INVITE --blocks {row.first}:{row.end}` helps"
            " most"
        )
    if len(state.stages) > 1:
        return _of_stages(state.stages)
    replicas = state.stages[0].claims.replicas if state.stages else 0
    if not replicas:
        return ""
    if replicas == 1:
        return "1 peer trains; another one of its speed doubles a round's work: `peer join INVITE`"
    return (
        f"{replicas} peers train; one more of their usual speed makes a round's work 1/{replicas} larger:"
        " `peer join INVITE`"
    )


def _of_stages(stages: tuple[StageState, ...]) -> str:
    """A pipeline is as fast as its slowest stage, so one more replica helps there; by the same throughput of stages by
    which peers move (`swarm.placement.load`)."""
    empty = next((stage for stage in stages if not stage.claims.replicas), None)
    if empty is not None:
        return f"stage {empty.stage} has no replica: `peer join INVITE --stage {empty.stage}` lets the pipeline run"
    if not all(stage.claims.capacity for stage in stages):
        return ""
    slowest, *others = sorted(stages, key=lambda stage: stage.claims.capacity)
    now = slowest.claims.capacity
    then = min(now * (1 + 1 / slowest.claims.replicas), others[0].claims.capacity)
    have = "one replica" if slowest.claims.replicas == 1 else f"{slowest.claims.replicas} replicas"
    return (
        f"stage {slowest.stage} is the slowest, with {have}: one more with `peer join INVITE --stage {slowest.stage}`"
        f" lets the pipeline go from {now:.3g} to {then:.3g} micro-batches a second"
    )
