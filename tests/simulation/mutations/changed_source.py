"""Functions whose source is changed: for a rule that is one condition in the midst of a longer function."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

NEVER_TRUE = "if False:"


def changed(owner: Any, name: str, old: str, new: str) -> Callable[[], list[Any]]:
    """Return what puts a function with another text in place of `owner`'s, a class or a module. Raises where the
    text is not there exactly once: then the rule has moved."""

    def patches() -> list[Any]:
        found = inspect.getattr_static(owner, name)
        function = getattr(found, "fget", None) or getattr(found, "__func__", found)
        source = textwrap.dedent(inspect.getsource(function))
        if source.count(old) != 1:
            raise LookupError(f"{owner.__name__}.{name} has not one {old!r}")
        source = source.replace(old, new).replace("super()", f"super({owner.__name__}, self)")
        made: dict[str, Any] = {}
        exec(compile(source, f"<{owner.__name__}.{name} without a rule>", "exec"), function.__globals__, made)
        return [patch.object(owner, name, made[name])]

    return patches
