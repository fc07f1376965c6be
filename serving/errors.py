"""What a client is told when its request cannot be carried out.

The one error body is {"error": {"message", "type", "param", "code"}}.
"""

from typing import Any

from messages import in_short


class RequestError(Exception):
    """A caller's mistake, or a state in which nothing can be served; becomes the error body."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code

    def body(self) -> dict[str, Any]:
        # HTTP has 501 for odd encodings, 505 for odd versions.
        is_callers = self.status < 500 or self.status in (501, 505)
        kind = "invalid_request_error" if is_callers else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        }


def engine_failure(error: Exception) -> RequestError:
    """What a client is told of a fault that is not its own, once its traceback has been logged."""
    # The frames hold the request, which holds the error: a cycle, with all tensors of a forward.
    error.__traceback__ = None
    message = f"the engine failed: {type(error).__name__}: {in_short(error)}"
    return RequestError(message, status=500, code="engine_failed")
