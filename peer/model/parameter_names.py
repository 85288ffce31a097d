"""Names of parameters: what others' programs write in a file, as the names that a model of Hugging Face has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from peer.errors import CheckpointError
from peer.plain_text import plain

_WRAPPERS: Final = frozenset(
    {
        "_orig_mod",  # torch.compile
        "module",  # DistributedDataParallel, DeepSpeed
        "_forward_module",  # Lightning
        "_fsdp_wrapped_module",
        "_checkpoint_wrapped_module",
    }
)
_OUTER: Final = ("model", "base_model")  # a base model has neither, a model inside of another object several
_BASE: Final = ("embed_tokens", "layers", "norm", "rotary_emb")
_SHOWN_MAX: Final = 100


def canonical_name(name: str) -> str:
    """Return the name of a parameter without what wraps its modules, and with the prefix that a base model lacks."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    inner = 0
    while inner < len(parts) and parts[inner] in _OUTER:
        inner += 1
    if parts[inner : inner + 1] == ["lm_head"]:
        return ".".join(parts[inner:])
    if inner < len(parts) and parts[inner] in _BASE:
        return ".".join(("model", *parts[inner:]))
    return ".".join(parts)


def canonical_names(where: object, names: Iterable[str]) -> dict[str, str]:
    """Return the names in the files of one checkpoint by their canonical names; `where` names it in errors. Raises
    CheckpointError if two become one."""
    found: dict[str, str] = {}
    for name in names:
        other = found.setdefault(canonical_name(name), name)
        if other != name:
            raise CheckpointError(
                f"{where} holds {shown(other)} and {shown(name)}, which name one parameter: remove one of the two from"
                " the file, or save the model again without its wrapper"
            )
    return found


def shown(name: str) -> str:
    """Return the name of a parameter for an error."""
    return plain(name, _SHOWN_MAX)
