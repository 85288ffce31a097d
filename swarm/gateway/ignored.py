"""Parameters of a request that change no answer: they are ignored, and a header of the response lists them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

IGNORED_HEADER: Final = "X-Barnraise-Ignored"
NAMES_MAX: Final = 32
NAME_CHARS_MAX: Final = 64

_FOR_OTHERS: Final = frozenset(
    {
        "cache_prompt",
        "cache_salt",
        "id_slot",
        "keep_alive",
        "metadata",
        "parallel_tool_calls",
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "rid",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Parameters for a provider's records, queues and caches: no value of them changes the text of an answer."""

_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (),  # vLLM's default differs between chats and completions
    "best_of": (1,),
    "detokenize": (True,),
    "encoder_repetition_penalty": (1,),
    "function_call": ("none", "auto"),
    "guidance_scale": (1,),
    "include_obfuscation": (True, False),
    "include_reasoning": (True,),
    "length_penalty": (1,),
    "modalities": (["text"], []),
    "n_predict": (-1,),
    "num_beams": (1,),
    "repeat_penalty": (1,),
    "response_format": ({"type": "text"}, {}),
    "separate_reasoning": (True,),
    "spaces_between_special_tokens": (True,),
    "stream_reasoning": (True,),
    "tfs": (1,),
    "tfs_z": (1,),
    "tool_choice": ("none", "auto"),
    "truncate_prompt_tokens": (-1,),
    "typical_p": (1,),
    "verbosity": ("medium",),
}
"""The values with which a parameter changes nothing, as OpenAI, vLLM, SGLang, llama.cpp and others define it, where
they are not those of `_EMPTY`."""
_EMPTY: Final[tuple[Any, ...]] = (False, 0, "", [], {})


class Unsupported(ValueError):
    """A parameter that would change the answer. Its text is the name."""


def without_ignored(given: Mapping[str, Any], known: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the known parameters that are not null, and the names of the others, which change nothing. Raises
    Unsupported for one that would change the answer."""
    kept, ignored = dict[str, Any](), list[str]()
    for name, value in given.items():
        if value is None:
            continue
        if name in known:
            kept[name] = value
        elif name in _FOR_OTHERS or _changes_nothing(name, value):
            ignored.append(name)
        else:
            raise Unsupported(name)
    return kept, ignored


def _changes_nothing(name: str, value: Any) -> bool:
    neutral = _NEUTRAL.get(name, _EMPTY)
    return any(one == value and isinstance(one, bool) == isinstance(value, bool) for one in neutral)  # True is not 1


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Return the response's header that lists ignored parameters, of about 2 kB at most; empty for none. Names are
    percent-encoded, and cut before a character that has no room."""
    return {IGNORED_HEADER: ", ".join(map(_encoded, names[:NAMES_MAX]))} if names else {}


def _encoded(name: str) -> str:
    encoded = ""
    for character in name[:NAME_CHARS_MAX]:
        more = quote(character, safe="", errors="replace")
        if len(encoded) + len(more) > NAME_CHARS_MAX:
            break
        encoded += more
    return encoded
