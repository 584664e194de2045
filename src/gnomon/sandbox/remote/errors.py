"""Errors of the E2B SDK as errors of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import e2b
import httpx

from gnomon.errors import CapacityError, ConfigError, GnomonError, SandboxError, SandboxLost, SandboxTimeout, Unsupported


@contextlib.contextmanager
def told(what: str) -> Iterator[None]:
    """Whatever the SDK raises while doing `what` comes out as one of our errors, naming it; the end of a program is none."""
    try:
        yield
    except (GnomonError, e2b.CommandExitException):
        raise
    except (e2b.SandboxNotFoundException, e2b.SandboxNotRunningException) as error:
        raise SandboxLost(f"{what}: {error}") from error
    except e2b.TimeoutException as error:
        raise SandboxTimeout(f"{what}: {error}") from error
    except e2b.AuthenticationException as error:
        raise Unsupported(f"{what}: {error} (E2B_API_KEY, and E2B_API_URL for a server of your own)") from error
    except (e2b.RateLimitException, e2b.NotEnoughSpaceException) as error:
        raise CapacityError(f"{what}: {error}") from error
    except (e2b.SandboxException, httpx.HTTPError, OSError) as error:
        text = f"{what}: {error}"
        status = getattr(error, "status_code", None)
        if status == 503:
            raise CapacityError(text) from error
        if status == 404 and "template" in text:
            raise ConfigError(text) from error
        if status in (400, 501):
            raise Unsupported(text) from error
        raise SandboxError(text) from error
