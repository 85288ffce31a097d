"""What faults of machines and their disks must do, and those that last for ever."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

from swarm.protocol.agreement import events
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.actions import Persist
from swarm.protocol.agreement.records import BALLOT_KEY, LINK_KEY
from tests.simulation import aftermath, rare_faults
from tests.simulation.disk import Disk
from tests.simulation.judging.happenings import ASK, fault, happens, heard, node, pass_s, placed
from tests.simulation.setups import Setup
from tests.simulation.tensors import GENESIS
from tests.simulation.world import World

# -- machines ----------------------------------------------------------------------------------------------------------


def writes(disk: Disk, kinds: str) -> None:
    """Write so many records: s: synced, w: on their way to the disk."""
    for number, kind in enumerate(kinds):
        disk.write(Persist(number, f"{LINK_KEY}{number}", bytes([number]), bytes([number])))
        if kind == "s":
            disk.sync(number)


def after_crash(kind: str, records: str = "sswwww") -> list[int]:
    """Return the numbers of the records that are there after a crash of this kind."""
    world = placed()
    disk = world.machines["B"].disk
    writes(disk, records)
    fault(world, "crash", "B", kind, 0, 3.0)
    assert not world.machines["B"].up and not disk.written
    return [record[0] for record in disk.synced.records.values()]


@happens
def crash_that_keeps_all() -> None:
    assert after_crash("kept") == [0, 1, 2, 3, 4, 5]


@happens
def crash_that_loses_what_is_not_synced() -> None:
    assert after_crash("unsynced") == [0, 1]


@happens
def crash_that_loses_a_part_of_it() -> None:
    disks = [Disk() for _ in range(20)]
    for seed, disk in enumerate(disks):
        writes(disk, "sswwww")
        disk.crash("prefix", Random(seed))
    left = {tuple(record[0] for record in disk.synced.records.values()) for disk in disks}
    assert left == {tuple(range(count)) for count in (2, 3, 4, 5, 6)}


@happens
def crash_that_loses_the_disk() -> None:
    assert after_crash("wiped") == []
    disk = Disk()
    writes(disk, "ss")
    disk.save_backup()
    disk.crash("wiped", Random(0))
    assert not disk.holds(bytes([1])) and disk.synced.link == b"" and not disk.restore()


@happens
def crash_of_a_machine_whose_log_is_lost() -> None:
    disk = Disk()
    disk.log = []
    writes(disk, "ss")
    disk.crash("wiped", Random(0))
    assert disk.log == []


@happens
def crash_and_restart() -> None:
    world = placed()
    began = world.machines["B"].life
    fault(world, "crash", "B", "kept", 0, 3.0)
    assert heard_nothing(world, "B")
    pass_s(world, 2.9)
    assert events.PeerDown("B") in node(world, "A").events
    assert not world.machines["B"].up
    pass_s(world, 1.0)
    assert world.machines["B"].up and world.machines["B"].life == began + 2
    fault(world, "crash", "C", "kept", 0, None)
    fault(world, "crash", "C", "kept", 0, 0.2)  # one that is down already stays down
    pass_s(world, 6.0)
    assert not world.machines["C"].up


@happens
def no_crash_after_the_last_fault() -> None:
    world = placed()
    world.liveness.left = aftermath.Left(frozenset("WAB"), "alone")
    fault(world, "crash", "B", "kept", 0, None)
    assert world.machines["B"].up


def heard_nothing(world: World, peer: str) -> bool:
    """Return whether a machine that is down takes no message."""
    seen = world.covered["ask_chain"]
    world.transmit("A", peer, ASK)
    pass_s(world, 1.0)
    return world.covered["ask_chain"] == seen


@happens
def crash_between_two_actions() -> None:
    world = placed()
    machine, disk = world.machines["B"], world.machines["B"].disk
    node(world, "B").step = lambda now, event: [Persist(n, f"{LINK_KEY}{n}", bytes([n])) for n in range(5)]  # type: ignore
    node(world, "A").step = node(world, "B").step  # type: ignore
    fault(world, "crash", "A", "unsynced", 2, None)
    fault(world, "crash", "B", "kept", 2, None)
    assert machine.up
    machine.step(events.PeerUp("A"))
    world.machines["A"].step(events.PeerUp("B"))
    assert not machine.up and len(disk.synced.records) == 2 and machine.node is None
    assert not world.machines["A"].up and not world.machines["A"].disk.synced.records
    machine.step(events.PeerUp("A"))  # it takes nothing any more
    fault(world, "crash", "C", "kept", 5, None)
    pass_s(world, 1.5)
    assert not world.machines["C"].up, "at the latest after a second"


@happens
def a_peer_that_loses_its_disk_may_begin_again() -> None:
    world = placed()
    world.invariants._highest["B"] = (9, 9, 9)
    fault(world, "crash", "B", "wiped", 0, None)
    assert "B" not in world.invariants._highest


@happens
def damage() -> None:
    def left(depth: float) -> tuple[list[int], bool]:
        world = placed(rare=("damage",))
        disk = world.machines["B"].disk
        writes(disk, "sssss")
        fault(world, "damage", "B", depth, 1.0)
        assert not world.machines["B"].up and disk.synced.records[BALLOT_KEY] == b""
        names = [record[0] for key, record in disk.synced.records.items() if key != BALLOT_KEY]
        pass_s(world, 2.0)
        return names, world.machines["B"].up and disk.holds(bytes([4]))

    assert left(0.0) == ([0, 1, 2, 3], True) and left(1.0) == ([], True), "states are in files of their own"


@happens
def a_peer_with_a_damaged_log_may_begin_again() -> None:
    world = placed(rare=("damage",))
    writes(world.machines["B"].disk, "ss")
    world.invariants._highest["B"] = (9, 9, 9)
    fault(world, "damage", "B", 0.0, 1.0)
    assert "B" not in world.invariants._highest


@happens
def restore() -> None:
    world = placed()
    machine = world.machines["W"]
    writes(machine.disk, "s")
    fault(world, "backup", "W")
    writes(machine.disk, "sss")
    world.invariants._stands["W"] = GENESIS
    fault(world, "restore", "W", True, 2.0)
    assert not machine.up and machine.restored and len(machine.disk.synced.records) == 1
    assert "W" not in world.invariants._stands
    pass_s(world, 2.5)
    assert machine.up and any("W starts, restored" in line for line in world.timeline)


@happens
def restore_loses_what_is_on_its_way() -> None:
    disk = Disk()
    disk.save_backup()
    writes(disk, "sw")
    assert disk.restore() and not disk.written and not disk.synced.records


@happens
def rate() -> None:
    world = placed()
    world.now = 10.0
    fault(world, "rate", "A", 0.9)
    assert world.machines["A"].local_time() == 9.0 and world.machines["B"].local_time() == 10.0


@happens
def jump() -> None:
    """Timers are due earlier."""
    world = placed()
    machine = world.machines["A"]
    machine.timers["soon"] = 30.0
    machine._arm("soon", 30.0)
    fault(world, "jump", "A", 25.0)
    assert machine.local_time() == 25.0
    pass_s(world, 6.0)
    assert node(world, "A").events == [events.TimerFired("soon")]


@happens
def freeze() -> None:
    """What comes to a frozen machine, from others or by its own timers, it takes later."""
    world = placed()
    machine = world.machines["A"]
    fault(world, "freeze", "A", 3.0)
    machine.later(1.0, machine.step, events.TimerFired("soon"))
    assert not world.reaches("A", "B") and world.reaches("B", "A")
    assert heard(world, "B", "A", seconds=2.5) == 0 and node(world, "A").events == []
    pass_s(world, 1.0)
    assert len(node(world, "A").events) == 2 and world.reaches("A", "B")


@happens
def pause() -> None:
    world = placed()
    machine = world.machines["A"]
    vote = msg.VoteMessage(machine.signer.sign("agreement.vote", msg.VoteBody(b"", 0, b"", node(world, "A").me)))
    world.invariants.sent = lambda *args: None  # type: ignore[method-assign]
    fault(world, "pause", "A", 10.0)
    assert machine.paused and node(world, "A").events == [events.Paused(True)]
    world.send(machine, "B", vote)
    world.send(machine, "C", ASK)
    pass_s(world, 1.0)
    assert [len(node(world, peer).events) for peer in "BC"] == [0, 1], "its votes come late"
    pass_s(world, 10.0)
    assert not machine.paused and node(world, "A").events == [events.Paused(True), events.Paused(False)]
    assert len(node(world, "B").events) == 1


@happens
def operator() -> None:
    world = placed()
    world.now = 5.0
    fault(world, "operator", True)
    assert node(world, "W").events == [events.RegroupRequested(undo=True)] and world.asked_at == 5.0


@happens
def suspect() -> None:
    world = placed()
    world.suspect("B", "A")
    assert not node(world, "B").events, "a peer that is heard is suspected only wrongly"
    for _ in range(2):
        fault(world, "suspect", "A", "B")
    assert node(world, "B").events == [events.PeerDown("A")] and "A" in world.machines["B"].suspects
    assert heard(world, "A", "B") == 1
    assert events.PeerUp("A") in node(world, "B").events and not world.machines["B"].suspects


@happens
def slow_peer() -> None:
    world = placed()
    before = [(world.machines[peer].train_s, world.machines[peer].fetch_s) for peer in "AB"]
    fault(world, "slow_peer", "A", 4.0)
    after = [(world.machines[peer].train_s, world.machines[peer].fetch_s) for peer in "AB"]
    assert after == [(4 * before[0][0], 4 * before[0][1]), before[1]]


@happens
def slow_disks() -> None:
    world = placed()
    fault(world, "slow_disks", 0.3)
    assert len({world.machines[peer].sync_s for peer in world.machines}) == len(world.machines)
    assert max(world.machines[peer].sync_s for peer in world.machines) > 0.1


@happens
def join() -> None:
    world = placed(joiners=1)
    assert not world.machines["a"].up
    took: list[object] = []
    world.machines["a"].step = took.append  # type: ignore[method-assign,assignment]
    fault(world, "join", "a")
    assert world.machines["a"].up
    pass_s(world, 1.0)
    assert events.PeerUp("a") in node(world, "A").events and events.PeerUp("A") in took


@happens
def lies() -> None:
    """What a liar sends and takes, its lie decides."""
    world = placed()
    said: list[object] = []
    liar = SimpleNamespace(send=lambda target, message: said.append(message), hears=lambda source, message: False)
    world.liars["C"] = liar  # type: ignore[assignment]
    world.send(world.machines["C"], "A", ASK)
    pass_s(world, 1.0)
    assert said == [ASK] and not node(world, "A").events and heard(world, "A", "C") == 0


# -- what is left ------------------------------------------------------------------------------------------------------


@happens
def parted_for_ever() -> None:
    world = placed()
    world.network.away = frozenset("A")
    assert world.network.is_cut("A", "B") and world.network.is_cut("B", "A") and not world.network.is_cut("B", "C")
    assert [heard(world, *way) for way in ("AB", "BA", "BC")] == [0, 0, 1]
    world = placed()
    world.transmit("A", "B", ASK)
    world.network.away = frozenset("A")
    world.advance(1.0)
    assert not node(world, "B").events, "what was on its way decides nothing any more"


@happens
def a_disk_that_is_lost_at_the_end() -> None:
    world = placed()
    writes(world.machines["B"].disk, "ss")
    world.transmit("B", "A", ASK)
    aftermath._lose_disk(world, world.machines["B"])
    world.advance(1.0)
    assert not world.machines["B"].up and not world.machines["B"].disk.synced.records
    assert not any(isinstance(event, events.Received) for event in node(world, "A").events)


@happens
def a_disk_that_is_lost_while_its_machine_is_down() -> None:
    world = placed()
    writes(world.machines["B"].disk, "ss")
    world.crash(world.machines["B"], "kept")
    world.invariants._highest["B"] = (9, 9, 9)
    aftermath._lose_disk(world, world.machines["B"])
    assert not world.machines["B"].disk.synced.records and "B" not in world.invariants._highest


@happens
def the_coordinator_that_dies() -> None:
    world = placed()
    world._end_coordinator()
    world.restart("W")
    assert not world.machines["W"].up


@happens
def waylay() -> None:
    """The coordinator is left with those that wait to be taken in."""
    setup = Setup("", 3, joiners=2, rare=("waylay",))
    (found,) = rare_faults.draw(setup, 1)
    assert found.kind == "cut" and set(found.args[0]) == {"W", "a", "b"} and not found.args[1]


@happens
def absence() -> None:
    """The coordinator is left with a minority, and its operator asks, also with `--undo`."""
    setup = Setup("", 5, rare=("absence",), faults_s=90.0)
    found = [one for seed in range(20) for one in rare_faults.draw(setup, seed)]
    cuts = [one for one in found if one.kind == "cut"]
    assert all("W" in one.args[0] and len(one.args[0]) <= 3 for one in cuts) and {one.args[2] for one in cuts} >= {60.0}
    assert {one.args for one in found if one.kind == "operator"} == {(True,), (False,)}
