"""What goes wrong with a request, as a status of HTTP and words for the client. Read next: `api.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gnomon.data.dialects.asked import Refused
from gnomon.errors import CapacityError, ConfigError, DataError, GnomonError
from gnomon.serve.admission import Busy

CLIENT_GONE = 499  # for the log: nobody is there to read it


class Rejected(GnomonError):
    """A request that is turned away before anybody reads what it asks: too large, too slow, no JSON, no key."""

    def __init__(self, status: int, message: str, code: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = dict(headers or {})


class ClientGone(GnomonError):
    """The client left before its answer was complete."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """An error as a client sees it."""

    status: int
    message: str
    place: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


def problem(error: Exception) -> Problem:
    """What a client is told about an error. What is not the client's doing is told without its inside."""
    text = str(error)
    match error:
        case Rejected():
            return Problem(status=error.status, message=text, code=error.code, headers=error.headers)
        case Refused():
            return Problem(status=404 if error.code == "model_not_found" else 400, message=text, place=error.field, code=error.code)
        case Busy():
            code = "shutting_down" if error.draining else "rate_limit_exceeded"
            later = {"retry-after": str(error.retry_seconds)}
            return Problem(status=503 if error.draining else 429, message=text, code=code, headers=later)
        case ClientGone():
            return Problem(status=CLIENT_GONE, message=text)
        case CapacityError():
            return Problem(status=400, message=text, code="context_length_exceeded")
        case ConfigError() | DataError():
            return Problem(status=400, message=text, code="invalid_value")
        case GnomonError():
            return Problem(status=500, message=text, code="server_error")
        case _:
            return Problem(status=500, message="the server failed; its log has the reason under this request's id", code="server_error")
