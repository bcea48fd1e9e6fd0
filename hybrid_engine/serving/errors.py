"""Errors of requests, in the format of the protocol that a path speaks.

OpenAI's: `{"error": {"message", "type", "param", "code"}}` and a status. Anthropic's, below `/v1/messages`:
`{"type": "error", "error": {"type", "message"}}` (https://docs.anthropic.com/en/api/errors).
"""

from typing import Any

from pydantic import ValidationError

from hybrid_engine.generation.guides import GuideError

MAX_SHOWN = 200
"""Maximum number of characters of a client's value in a message to it."""

MAX_MESSAGE = 2000
"""Maximum number of characters of a message, including text from libraries."""


def cut(text: str) -> str:
    """`text`, sent by a client, cut to MAX_SHOWN characters."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


class RequestError(Exception):
    """An error of one request; the server continues.

    Args:
        param: the field of the body with the error.
        code: OpenAI's code for the error.
        is_last: whether the connection is closed, because the request was not read completely.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        is_last: bool = False,
    ):
        message = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}..."
        super().__init__(message)
        self.message, self.status, self.kind, self.param, self.code = message, status, kind, param, code
        self.retry_after, self.is_last = retry_after, is_last

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the response."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """`Retry-After` in seconds, if it is known, and `Connection: close` for a last request."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return headers | ({"Connection": "close"} if self.is_last else {})


ANTHROPIC_PATHS = "/v1/messages"
ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's types of errors by status; others are "api_error" from 500 on, and invalid requests below."""


def error_body(path: str, error: RequestError) -> dict[str, Any]:
    """The JSON of `error` in the words of the protocol that is spoken at `path`."""
    if not path.startswith(ANTHROPIC_PATHS):
        return error.body
    other = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = ANTHROPIC_KINDS.get(error.status, other)
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def overloaded(num_waiting: int, limit: int, what: str = "answers wait to begin") -> RequestError:
    """429: the maximum number of requests is waiting."""
    return RequestError(
        f"{num_waiting} {what} and at most {limit} may; send the request again later",
        status=429,
        kind="rate_limit_error",
        code="overloaded",
        retry_after=1,
    )


def not_finite() -> RequestError:
    """500: the logits are not finite, so that there is no next token."""
    return RequestError(
        "the model's logits are not finite; the answer ends here",
        status=500,
        kind="server_error",
        code="generation_failed",
    )


def rule_failed(error: Exception) -> RequestError:
    """400 if a client's guide is too large; 500 for any other `error` of a rule that affects only this answer."""
    if isinstance(error, GuideError):
        return RequestError(str(error), code="guide_failed")
    return RequestError(
        f"a rule of this request failed: {type(error).__name__}: {error}; the answer ends here",
        status=500,
        kind="server_error",
        code="rule_failed",
    )


def ended(cause: BaseException | None) -> RequestError:
    """503: generation has ended because of the error `cause`, or because the server is shutting down (None)."""
    if cause is None:
        reason, code = "the server is shutting down", "unavailable"
    else:
        reason, code = f"the model failed: {type(cause).__name__}: {cause}", "model_failed"
    return RequestError(f"{reason}; the answer ends here", status=503, kind="server_error", code=code)


def broken() -> RequestError:
    """500: an internal error of the server; its log has details."""
    return RequestError(
        "the server failed to process this request", status=500, kind="server_error", code="internal_error"
    )


def wrong_body(error: ValidationError) -> RequestError:
    """The first error in a body, with its field."""
    first = error.errors(include_url=False)[0]
    # Alternatives of a union come after the field: `prompt.list[int].0`.
    param = str(first["loc"][0]) if first["loc"] else None
    value = first.get("input")
    if first["type"] == "missing":
        return RequestError(
            f"{param} is missing; every request needs it", param=param, code="missing_required_parameter"
        )
    if first["type"] == "extra_forbidden":
        name = ".".join(map(str, first["loc"]))
        return RequestError(f"{name} is not supported; leave it out", param=param, code="unknown_parameter")
    shown = "" if isinstance(value, dict) and param is None else f"={cut(repr(value))}"
    reason = first["msg"].removeprefix("Value error, ")
    return RequestError(f"{param or 'body'}{shown}: {reason}", param=param, code="invalid_value")
