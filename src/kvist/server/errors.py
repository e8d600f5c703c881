"""Every failure as OpenAI's clients expect it: ``{"error": {"message", "type", "param", "code"}}``."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.responses import Response

from kvist.errors import DoesNotFit, EngineFailure, InputError, KvistError, UnknownModel, UnsupportedModel


class ApiError(Exception):
    """A failure with its HTTP status, ready to be sent."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object that is sent, in an answer's body or as a stream's error event."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The HTTP answer."""
        content = json.dumps(self.body).encode()
        return Response(content, self.status, self.headers, media_type="application/json")


STATUS: Mapping[type[KvistError], tuple[int, str | None]] = {
    UnknownModel: (404, "model_not_found"),
    UnsupportedModel: (400, "unsupported_model"),
    InputError: (400, "invalid_value"),
    DoesNotFit: (400, "does_not_fit"),
    EngineFailure: (500, "engine_failure"),
    KvistError: (500, "engine_failure"),
}
"""HTTP status and code of each error of ours; an error takes the entry of its nearest ancestor."""

HTTP_CODES: Mapping[int, str] = {404: "unknown_url", 405: "method_not_allowed"}


def from_kvist(error: KvistError) -> ApiError:
    """Translate one of our own errors."""
    nearest = next(kind for kind in type(error).__mro__ if kind in STATUS)
    status, code = STATUS[nearest]
    return ApiError(status, str(error), param=getattr(error, "key", None), code=code)


def from_validation(error: ValidationError) -> ApiError:
    """Name the first field at fault; the rest would mostly be its consequences."""
    first = error.errors(include_url=False)[0]
    kind, message, location = first["type"], first["msg"], _path(first["loc"])
    if kind == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']}", code="invalid_json")
    if kind == "unknown":
        field = first["ctx"]["field"]
        location = f"{location}.{field}" if location else field
        return ApiError(400, f"unknown field: {location}", param=location, code="unknown_field")
    if kind == "missing":
        return ApiError(400, f"missing field: {location}", param=location, code="missing_field")
    if kind == "unsupported":
        field = first["ctx"]["field"]
        location = f"{location}.{field}" if location else field
        return ApiError(400, message, param=location, code="unsupported_field")
    if not location and kind == "model_type":
        return ApiError(
            400, f"the body must be a JSON object, such as {{\"model\": \"NAME\", …}}{_got(first['input'])}",
            code="invalid_value",
        )  # fmt: skip
    if not location:
        # A rule about two fields is raised under the name of the one to change.
        location = kind if kind in message else ""
        return ApiError(400, message, param=location or None, code="invalid_value")
    return ApiError(
        400, f"{location}: {_lower_first(message)}{_got(first['input'])}", param=location, code="invalid_value"
    )


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def _got(value: Any) -> str:
    shown = repr(value)
    return f", got {shown}" if len(shown) <= 80 else ""
