"""Files that commands write for users: the commented RUN.toml of the embedded example, and that of a tuning run."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from importlib.resources import files


def template() -> str:
    """Return the commented RUN.toml of the embedded example."""
    return (files("cli.templates") / "run.toml").read_text()


def tuning_template(base: str, chats: str = "") -> str:
    """Return a commented RUN.toml that tunes an adapter of that checkpoint, a folder or an id of the Hub. `chats`: the
    conversations to tune to; "" leaves the data set to be named at the start."""
    text = with_settings((files("cli.templates") / "tune.toml").read_text(), "model", {"base": base})
    text = text.replace("--tokenizer OWNER/NAME", f"--tokenizer {shlex.quote(base)}")
    if not chats:
        return text
    return with_settings(text.replace("\n# chats = ", "\nchats = "), "data", {"chats": chats})


def with_settings(text: str, section: str, settings: Mapping[str, str | int | float | bool]) -> str:
    """Return a RUN.toml with these settings in that section, in place of what it says of them. A section that is not
    there is put at the end."""
    header = re.search(rf"^\[{section}\].*\n", text, re.MULTILINE)
    if header is None:
        text += f"\n[{section}]\n"
        return with_settings(text, section, settings)
    before, body = text[: header.end()], text[header.end() :]
    end = re.search(r"^\[|^# ----", body, re.MULTILINE)
    body, after = (body, "") if end is None else (body[: end.start()], body[end.start() :])
    for key, value in settings.items():
        line = f"{key} = {json.dumps(value, ensure_ascii=False)}"
        found = re.search(rf"^{key} = (?:\"(?:[^\"\\\\]|\\\\.)*\"|[^#\n]*[^#\s])", body, re.MULTILINE)
        body = f"{line}\n{body}" if found is None else body[: found.start()] + line + body[found.end() :]
    return before + body + after
