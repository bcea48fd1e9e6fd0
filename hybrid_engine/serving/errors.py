"""Errors as OpenAI's API words them: `{"error": {"message", "type", "param", "code"}}` and a status."""

from typing import Any

from pydantic import ValidationError


class RequestError(Exception):
    """What is wrong with one request; the server goes on.

    Args:
        param: the field of the body that it is about.
        code: OpenAI's word for it.
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
    ):
        super().__init__(message)
        self.message, self.status, self.kind, self.param, self.code = message, status, kind, param, code
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the response."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """When to come again, in seconds, where that is known."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


def overloaded(num_waiting: int, limit: int) -> RequestError:
    """429: as many requests wait as may."""
    return RequestError(
        f"{num_waiting} answers wait to begin and at most {limit} may; send the request again later",
        status=429,
        kind="rate_limit_error",
        code="overloaded",
        retry_after=1,
    )


def failed() -> RequestError:
    """500: the model failed, or ended, in the middle of an answer."""
    return RequestError(
        "the model's logits are not finite, or the server is ending; nothing more comes of this answer",
        status=500,
        kind="server_error",
        code="generation_failed",
    )


def wrong_body(error: ValidationError) -> RequestError:
    """The first thing that a body has wrong, by its field."""
    first = error.errors(include_url=False)[0]
    # Alternatives of a union are named after the field: `prompt.list[int].0`.
    param = str(first["loc"][0]) if first["loc"] else None
    value = first.get("input")
    shown = "" if isinstance(value, dict) and param is None else f"={_short(value)}"
    reason = first["msg"].removeprefix("Value error, ")
    return RequestError(f"{param or 'body'}{shown}: {reason}", param=param, code="invalid_value")


def _short(value: object, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
