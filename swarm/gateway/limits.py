"""Limits of requests: API keys, and each key's requests a minute and requests at once."""

from __future__ import annotations

import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from blake3 import blake3

from peer.errors import ConfigError
from peer.files import read_bounded
from swarm.gateway.errors import ApiError

KEYS_MAX: Final = 4096
MINUTE_S: Final = 60.0
BODY_BYTES_MAX: Final = 1 << 20
_FILE_BYTES_MAX: Final = 1 << 20
_KEY_BYTES: Final = 24
_HASH_DIGITS: Final = 64
NO_KEY: Final = ""


class ApiKeys:
    """The keys that may ask, as hashes by name. Without any, every request may."""

    def __init__(self, names: dict[str, str] | None = None) -> None:
        """`names`: the name of each key, by its hash."""
        self._names = names or {}

    @property
    def needed(self) -> bool:
        return bool(self._names)

    def holder(self, authorization: str) -> str:
        """Return the name of the key in a header like `Bearer KEY`. Raises ApiError."""
        if not self._names:
            return NO_KEY
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise ApiError(401, "no API key came with this request: send it as `Authorization: Bearer KEY`")
        name = self._names.get(key_hash(key.strip()))
        if name is None:
            raise ApiError(401, "this API key is not known here: ask the operator for one", code="invalid_api_key")
        return name


def key_hash(key: str) -> str:
    """Return what a key file says of a key."""
    return blake3(key.encode("utf-8", "surrogateescape")).hexdigest()


def new_key() -> str:
    """Return a key that cannot be guessed."""
    return "sk-" + secrets.token_urlsafe(_KEY_BYTES)


def read_keys(path: Path) -> ApiKeys:
    """Read a key file: a line for each key, with the blake3 hash of the key and its name. Raises ConfigError."""
    try:
        text = read_bounded(path, _FILE_BYTES_MAX).decode(errors="replace")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): name a file with hashes of keys") from error
    names: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split(maxsplit=1)
        if not words or words[0].startswith("#"):
            continue
        digits = words[0].lower()
        if len(digits) != _HASH_DIGITS or set(digits) - set("0123456789abcdef"):
            raise ConfigError(f"line {number} of {path} begins with no blake3 hash: make keys with --new-key")
        names[digits] = words[1].strip() if len(words) > 1 else f"line {number}"
    if not names or len(names) > KEYS_MAX:
        raise ConfigError(f"{path} holds {len(names)} keys: it takes 1 to {KEYS_MAX}")
    return ApiKeys(names)


class Quotas:
    """How many requests of each key are answered in a minute, and at once."""

    def __init__(self, per_minute: int | None, at_once: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`per_minute`: None for any number."""
        self._per_minute, self._at_once, self._clock = per_minute, at_once, clock
        self._running, self._coming = Counter[str](), Counter[str]()
        self._times: dict[str, deque[float]] = {}

    @contextmanager
    def body(self, name: str) -> Iterator[Callable[[int], None]]:
        """Count the bytes of a body while it comes: those of a key are at most what its requests at once may have. The
        block gets a function for the bytes that came, which raises ApiError."""
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            if self._coming[name] + size > self._at_once * BODY_BYTES_MAX:
                raise ApiError(
                    429,
                    f"{self._coming[name]} bytes of this key's requests wait for their ends: send fewer at once",
                    code="concurrency_limit_exceeded",
                    retry_s=1.0,
                )
            taken += size
            self._coming[name] += size

        try:
            yield take
        finally:
            self._coming[name] -= taken

    @contextmanager
    def one(self, name: str) -> Iterator[None]:
        """Count a request of this key as long as the block runs. Raises ApiError."""
        if self._running[name] >= self._at_once:
            raise ApiError(
                429,
                f"{self._at_once} requests of this key are being answered, which is the most: wait for one of them",
                code="concurrency_limit_exceeded",
                retry_s=1.0,
            )
        self._count(name)
        self._running[name] += 1
        try:
            yield
        finally:
            self._running[name] -= 1

    def _count(self, name: str) -> None:
        if self._per_minute is None:
            return
        now, times = self._clock(), self._times.setdefault(name, deque(maxlen=self._per_minute))
        if len(times) == self._per_minute and now - times[0] < MINUTE_S:
            raise ApiError(
                429,
                f"this key may send {self._per_minute} requests a minute: wait a moment",
                code="rate_limit_exceeded",
                retry_s=MINUTE_S - (now - times[0]),
            )
        times.append(now)
