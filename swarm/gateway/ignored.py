"""Parameters of a request that are not honoured: whether each is ignored or refused. The response lists ignored ones.

honoured   a field of the body's type (`swarm.gateway.asks`)
harmless   `HARMLESS`: no value changes the text of an answer, so it is ignored
refused    `REFUSED`: it would change the answer, so the request fails; with a neutral value it is ignored
unknown    any other, as of editors and frameworks: ignored
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

IGNORED_HEADER: Final = "X-Barnraise-Ignored"
NAMES_MAX: Final = 32
NAME_CHARS_MAX: Final = 64

HARMLESS: Final = frozenset(
    {
        "cache_prompt",
        "cache_salt",
        "id_slot",
        "include_obfuscation",
        "keep_alive",
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "priority",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "rid",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Parameters for a provider's records, queues and caches."""

EMPTY: Final[tuple[Any, ...]] = (False, 0, "", [], {})

REFUSED: Final[Mapping[str, tuple[Any, ...]]] = {
    # OpenAI's
    "audio": EMPTY,
    "best_of": (1,),
    "echo": EMPTY,
    "function_call": ("none", "auto"),
    "functions": EMPTY,
    "max_completion_tokens": EMPTY,
    "modalities": (["text"], []),
    "moderation": EMPTY,
    "reasoning_effort": EMPTY,
    "suffix": EMPTY,
    "tool_choice": ("none", "auto"),
    "tools": EMPTY,
    "top_logprobs": EMPTY,
    "verbosity": ("medium",),
    "web_search_options": (),  # {} turns the search on
    # of vLLM, SGLang, llama.cpp and others
    "add_generation_prompt": (True,),
    "add_special_tokens": (),  # vLLM's default differs between chats and completions
    "allowed_token_ids": EMPTY,
    "bad_words": EMPTY,
    "chat_template": EMPTY,
    "chat_template_kwargs": EMPTY,
    "continue_final_message": EMPTY,
    "detokenize": (True,),
    "documents": EMPTY,
    "dry_multiplier": EMPTY,
    "ebnf": EMPTY,
    "encoder_repetition_penalty": (1,),
    "grammar": EMPTY,
    "guidance_scale": (1,),
    "guided_choice": EMPTY,
    "guided_grammar": EMPTY,
    "guided_json": EMPTY,
    "guided_regex": EMPTY,
    "ignore_eos": EMPTY,
    "include_reasoning": (True,),
    "include_stop_str_in_output": EMPTY,
    "json_schema": EMPTY,
    "length_penalty": (1,),
    "logits_processors": EMPTY,
    "min_new_tokens": EMPTY,
    "min_tokens": EMPTY,
    "mirostat": EMPTY,
    "mirostat_mode": EMPTY,
    "n_predict": (-1,),
    "negative_prompt": EMPTY,
    "no_repeat_ngram_size": EMPTY,
    "num_beams": (1,),
    "penalty_alpha": EMPTY,
    "prompt_logprobs": EMPTY,
    "regex": EMPTY,
    "repeat_penalty": (1,),
    "separate_reasoning": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": EMPTY,
    "stream_reasoning": (True,),
    "structured_outputs": EMPTY,
    "tfs": (1,),
    "tfs_z": (1,),
    "top_a": EMPTY,
    "truncate_prompt_tokens": (-1,),
    "typical_p": (1,),
    "use_beam_search": EMPTY,
    "xtc_probability": EMPTY,
}
"""Parameters that would change the answer, each with the values that change nothing, as those who define it say."""

REFUSED_IN_MESSAGES: Final[Mapping[str, tuple[Any, ...]]] = dict.fromkeys(
    ("audio", "function_call", "name", "refusal", "tool_call_id", "tool_calls"), EMPTY
)
"""The same, of one message."""


class Unsupported(ValueError):
    """A parameter that would change the answer. Its text is the name."""


def without_ignored(
    given: Mapping[str, Any], known: Sequence[str], refused: Mapping[str, tuple[Any, ...]] = REFUSED
) -> tuple[dict[str, Any], list[str]]:
    """Return the known parameters that are not null, and the names of the others, which are ignored. Raises Unsupported
    for one that would change the answer."""
    kept, ignored = dict[str, Any](), list[str]()
    for name, value in given.items():
        if value is None:
            continue
        if name in known:
            kept[name] = value
        elif name not in refused or _is_one_of(refused[name], value):
            ignored.append(name)
        else:
            raise Unsupported(name)
    return kept, ignored


def _is_one_of(neutral: Sequence[Any], value: Any) -> bool:
    return any(one == value and isinstance(one, bool) == isinstance(value, bool) for one in neutral)  # True is not 1


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Return the response's header that lists ignored parameters; empty for none."""
    return {IGNORED_HEADER: ignored_text(names)} if names else {}


def ignored_text(names: Sequence[str]) -> str:
    """Return the list of ignored parameters, of about 2 kB at most. Names are percent-encoded, and cut before a
    character that has no room."""
    return ", ".join(map(_encoded, names[:NAMES_MAX]))


def _encoded(name: str) -> str:
    encoded = ""
    for character in name[:NAME_CHARS_MAX]:
        more = quote(character, safe="", errors="replace")
        if len(encoded) + len(more) > NAME_CHARS_MAX:
            break
        encoded += more
    return encoded
