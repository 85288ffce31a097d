"""Which of the text that a chat template makes of a conversation counts in the loss.

What counts are the answers: what the template's tag {% generation %} holds. Of a template without the tag the text is
compared with and without each answer. Where the one does not begin as the other does, the last answer alone counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from peer.data.chat_template import ChatTemplateCode
from peer.data.conversations import ANSWERER, MarkedText, Span


def marked_text(code: ChatTemplateCode, messages: Sequence[Mapping[str, str]]) -> MarkedText:
    """Return a conversation as text, and which of it counts. Raises ValueError, whose text says why not."""
    answers = [at for at, message in enumerate(messages) if message["role"] == ANSWERER]
    if not answers:
        raise ValueError(f"without a message of the role {ANSWERER}")
    text, spans = code.render_tagged(messages)
    if spans:
        return MarkedText(text, tuple(spans), "tags")
    found = [_compared(code, messages, text, at) for at in answers]
    whole = [span for span in found if span is not None]
    if len(whole) == len(found):
        return MarkedText(text, tuple(whole), "compared")
    start = _before(code, messages[:-1], text) if answers[-1] == len(messages) - 1 else None
    if start is not None and start < len(text):
        return MarkedText(text, ((start, len(text)),), "last answer")
    raise ValueError("of which the template does not show where an answer is")


def _compared(code: ChatTemplateCode, messages: Sequence[Mapping[str, str]], text: str, at: int) -> Span | None:
    """Return where the answer with that number lies in the text; None where the shorter texts do not begin it."""
    start = _before(code, messages[:at], text)
    after, _ = code.render_tagged(messages[: at + 1])
    return (start, len(after)) if start is not None and text.startswith(after) and start < len(after) else None


def _before(code: ChatTemplateCode, messages: Sequence[Mapping[str, str]], text: str) -> int | None:
    """Return where the text goes on after these messages and what stands before an answer."""
    try:
        before, _ = code.render_tagged(messages, is_open=True)
    except ValueError:  # a template may refuse to begin with an answer
        return None
    return len(before) if text.startswith(before) else None
