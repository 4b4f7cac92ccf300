"""``Problem``: an HTTP error as the answer to a request."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import Any

from qsf.errors import QsfArgumentError, QsfCancelledError, QsfError, error_line

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class Problem(Exception):  # noqa: N818
    """Why a request is refused or failed.

    Attributes:
        status: of HTTP.
        code: the reason in one word, such as "queue_full".
        param: the field at fault; None: none.
        retry_seconds: when to try again; None: not stated.
        is_final: trying again cannot help, despite the status.
        allow: the methods that the path has.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_seconds: int | None = None,
        is_final: bool = False,
        allow: str = "",
    ) -> None:
        super().__init__(error_line(message))
        self.status = status
        self.code = code
        self.param = param
        self.retry_seconds = retry_seconds
        self.is_final = is_final
        self.allow = allow

    @property
    def kind(self) -> str:
        """The type of the error by the names of OpenAI and Anthropic."""
        return _KINDS.get(self.status) or (
            "invalid_request_error" if self.status < 500 else "api_error"
        )

    def body(self) -> dict[str, Any]:
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_seconds is not None:
            headers["retry-after"] = str(self.retry_seconds)
        if self.is_final and self.status >= 500:
            headers["x-should-retry"] = "false"  # OpenAI's client repeats requests after a 500
        if self.allow:
            headers["allow"] = self.allow
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def invalid(param: str, message: str, code: str = "invalid_value") -> Problem:
    return Problem(400, code, message, param=param)


def internal(error: Exception) -> Problem:
    """Return the problem for an error of our own, which must not look like one of the network."""
    text = f"internal error, please report it: {type(error).__name__}: {error}"
    return Problem(500, "internal_error", text)


def problem_of(error: QsfError) -> Problem:
    """Return the problem that reports an error of the engine or the tokenizer to a client."""
    if isinstance(error, QsfArgumentError):
        problem = Problem(400, "invalid_value", str(error), param=error.argument)
    elif isinstance(error, QsfCancelledError):
        problem = Problem(500, "cancelled", str(error))
    else:
        problem = Problem(500, "engine_error", str(error), is_final=True)
    problem.__cause__ = error
    return problem
