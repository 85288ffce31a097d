"""Errors as OpenAI's interface reports them: a status, and a JSON body with message, type, parameter and code."""

from __future__ import annotations

import math
from typing import Any, Final

from peer.errors import BarnraiseError, ConfigError
from peer.plain_text import plain
from peer.worker.grammar.client import GrammarRefused
from swarm.gateway.template import TemplateFailed, ToolsRefused
from swarm.inference.client_view import NoServers

_TYPES: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_RETRY_S: Final = 5
MESSAGE_CHARS_MAX: Final = 600


class ApiError(Exception):
    """A refusal of one request. It never ends the process."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry_s = status, code, param, retry_s

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        told = plain(str(self), MESSAGE_CHARS_MAX)
        return {"error": {"message": told, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_s is None else {"Retry-After": str(max(1, math.ceil(self.retry_s)))}


def as_api_error(error: BarnraiseError, grammar_of: str = "response_format") -> ApiError:
    """Return the reply to a client for an error of the servers, the network or the conversation. `grammar_of`: the
    parameter that brought the grammar of an answer."""
    if isinstance(error, TemplateFailed):
        return ApiError(400, str(error), code="chat_template_failed", param="messages")
    if isinstance(error, ToolsRefused):
        return ApiError(400, str(error), code="unsupported_parameter", param="tools")
    if isinstance(error, GrammarRefused):
        return ApiError(400, str(error), code="invalid_value", param=grammar_of)
    if isinstance(error, ConfigError):
        return ApiError(400, str(error), code="invalid_value")
    code = "no_servers" if isinstance(error, NoServers) else "servers_failed"
    return ApiError(503, str(error), code=code, retry_s=_RETRY_S)
