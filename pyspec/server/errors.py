"""What is said when a request is refused or fails, in the shape that OpenAI's clients read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.responses import JSONResponse

from pyspec.errors import ContextOverflowError, PyspecError, UsageError


class ApiError(PyspecError):
    """A request that cannot be answered.

    Args:
        message: One line that says what is wrong and what to do.
        status: The HTTP status.
        param: The field that is at fault.
        code: A word for programs.
        headers: Further headers of the response.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def type(self) -> str:
        """The kind of error, in OpenAI's words."""
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self) -> dict[str, Any]:
        """The JSON that the client gets."""
        return {
            "error": {
                "message": str(self),
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """The HTTP response."""
        return JSONResponse(self.body(), self.status, self.headers)


def busy(message: str) -> ApiError:
    """The service cannot take the request now, and may soon."""
    return ApiError(message, status=503, code="overloaded", headers={"Retry-After": "1"})


def as_api_error(error: BaseException) -> ApiError:
    """What the client is told of an error; nothing of the program's inside."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextOverflowError):
        return ApiError(str(error), code="context_length_exceeded")
    if isinstance(error, UsageError):
        return ApiError(str(error), code="invalid_value")
    if isinstance(error, PyspecError):
        return ApiError(str(error), status=500, code="generation_failed")
    return ApiError("the service has failed: its log says how", status=500, code="internal_error")


def from_validation(errors: Sequence[Mapping[str, Any]], body: object) -> ApiError:
    """Name the field that did not validate: the one furthest inside, of alternatives that all failed.

    Args:
        errors: As pydantic lists them, with "loc", "msg" and "type".
        body: What was validated.
    """
    located = [(_path(_location(error), body), error) for error in errors]
    path, error = max(located, key=lambda pair: len(pair[0]))
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    param = param.removeprefix(".")
    if error["type"] == "extra_forbidden":
        message = f"{param} is not known here"
    elif error["type"] == "missing" and not param:
        message = "the request has no JSON body: send one, as Content-Type: application/json"
    elif error["type"] == "json_invalid":
        message, param = "the body is not valid JSON", ""
    elif error["type"] == "model_attributes_type" and not param:
        message = "the body is not a JSON object sent as Content-Type: application/json"
    else:
        message = f"{param}: {error['msg']}"
    return ApiError(message, param=param or None, code=_CODES.get(error["type"], "invalid_value"))


_CODES = {"extra_forbidden": "unknown_parameter", "missing": "missing_required_parameter"}


def _location(error: Mapping[str, Any]) -> tuple[str | int, ...]:
    """Where the error is: of alternatives that a field tells apart, at that field."""
    location: tuple[str | int, ...] = error["loc"]
    if error["type"] in ("union_tag_invalid", "union_tag_not_found"):
        return (*location, error["ctx"]["discriminator"].strip("'"))
    return location


def _path(location: Sequence[str | int], body: object) -> list[str | int]:
    """The part of pydantic's location that is in the request; the rest are names of alternatives."""
    path: list[str | int] = []
    # The first part says that it is the body, and only the last may name what is not there.
    for at, part in enumerate(location[1:], start=2):
        is_inside = part in body if isinstance(body, Mapping) else isinstance(part, int)
        if is_inside and isinstance(body, (Mapping, list)):
            body = body[part]  # type: ignore[index]
        elif at < len(location) or not isinstance(body, Mapping):
            continue
        path.append(part)
    return path
