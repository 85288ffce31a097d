"""What the last server of a session may draw and send on: the other half of `swarm.inference.drawing`."""

from __future__ import annotations

from swarm.inference.masks import KeptMasks
from swarm.inference.messages import StartSession


class ServedDrawing:
    """The positions whose tokens are drawn, the one drawn token that waits for the client, and the masks that came."""

    def __init__(self, start: StartSession) -> None:
        self._start = start
        """The last revision."""
        self._allowed, self._known = start.allowed, start.known
        self._held: tuple[int, int] | None = None
        self._asked = set[int]()
        self._masks = KeptMasks()

    def wire(self, start: StartSession) -> None:
        """Take over a new revision."""
        self._start = start
        self.allow(start.allowed, start.known)
        self._held, self._masks = None, KeptMasks()

    def allow(self, position: int, known: int) -> None:
        """Take over how far tokens may be drawn, and which ones the client has set."""
        self._allowed, self._known = max(self._allowed, position), max(self._known, known)
        if self._held is not None and self._held[0] < self._known:
            self._held = None

    def mask(self, payload: memoryview, vocab_size: int) -> tuple[int, bytes]:
        """Return the position and the bits of a mask that came. Raises ValueError."""
        if not self._start.sampling.masked:
            raise ValueError("a mask for a session without them")
        return self._masks.unpack(payload, vocab_size)

    def ask(self, position: int) -> bool:
        """Note that the token of a position is to be drawn. Return whether it is: the client may have it already."""
        self._asked.add(position)
        return position >= self._known

    def was_asked(self, position: int) -> bool:
        """Whether the token of a position, which has been computed now, was to be drawn."""
        asked = position in self._asked
        self._asked.discard(position)
        return asked

    def rewind(self, position: int) -> None:
        """Forget what was to be drawn behind a position."""
        self._asked = {at for at in self._asked if at <= position}
        self._held = None

    def hold(self, position: int, token: int) -> None:
        """Keep a drawn token until it may be sent on."""
        self._held = position, token

    def take(self) -> tuple[int, int] | None:
        """Return the drawn token (position, id) that is to be sent on, so that the next one is drawn, and forget it;
        None if there is none, or the client does not allow the next one yet."""
        if self._held is None:
            return None
        position, token = self._held
        if not self._start.target or token in self._start.stops or position + 1 >= self._allowed:
            return None
        self._held = None
        return position, token
