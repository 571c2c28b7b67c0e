"""Every exception that Culet raises on purpose.

CuletError                   says what failed, and `hint` names the fix
├── UserError                the caller can fix it (exit code 1, or 2 for a bad setting or field)
│   ├── ConfigError          a bad setting or combination of settings
│   ├── CheckpointError      a model folder that cannot be read or is incomplete
│   ├── UnsupportedError     a feature that Culet does not have
│   ├── BadRequest           a request with a bad field
│   └── ContextTooLong       a prompt, or prompt + max_tokens, that does not fit the context
├── CapacityError            the caller may try again (exit code 1)
│   ├── QueueFull            too many requests are waiting
│   ├── TimedOut             a request that took too long
│   └── OutOfPages           the arena has no free page (handled by preemption, so users never see it)
└── InternalError            a bug or a crash (exit code 3)
    └── WorkerDied           the engine or a worker process died (exit code 2)

Statuses and exit codes are mapped only here, by `HTTP_STATUS` and `EXIT_CODES`.
"""

from __future__ import annotations


class CuletError(Exception):
    """Base class: one line that says what failed, and a hint that names the fix."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class UserError(CuletError):
    """Something the caller can fix."""


class ConfigError(UserError):
    """A bad setting, or a bad combination of settings."""


class CheckpointError(UserError):
    """A model folder that cannot be read or is incomplete."""


class UnsupportedError(UserError):
    """A feature that Culet does not have."""


class BadRequest(UserError):
    """A request with a bad field."""


class ContextTooLong(UserError):
    """A request that does not fit the model's context or the cache."""


class CapacityError(CuletError):
    """No room now. The caller may try again."""


class QueueFull(CapacityError):
    """The waiting queue is full."""


class TimedOut(CapacityError):
    """A request took too long."""


class OutOfPages(CapacityError):
    """The arena has fewer free pages than requested."""


class InternalError(CuletError):
    """A bug or a crash in Culet."""


class WorkerDied(InternalError):
    """The engine or a worker process died."""


# A subclass inherits the status of its nearest parent.
HTTP_STATUS: dict[type[CuletError], int] = {
    UserError: 400,
    CapacityError: 429,
    TimedOut: 504,
    InternalError: 500,
    WorkerDied: 503,
}

# Exit codes. With 2, the same command would fail again, so a supervisor should not repeat it: the command line or a setting is
# wrong, or the engine has died too often.
FAILED, NO_RETRY, FAULT = 1, 2, 3

# A subclass inherits the code of its nearest parent.
EXIT_CODES: dict[type[CuletError], int] = {
    CuletError: FAILED,
    ConfigError: NO_RETRY,
    BadRequest: NO_RETRY,
    InternalError: FAULT,
    WorkerDied: NO_RETRY,
}


def http_status(error: CuletError) -> int:
    """Return the HTTP status for `error`."""
    return next(HTTP_STATUS[cls] for cls in type(error).__mro__ if cls in HTTP_STATUS)


def exit_code(error: CuletError) -> int:
    """Return the exit code of a command that failed with `error`."""
    return next(EXIT_CODES[cls] for cls in type(error).__mro__ if cls in EXIT_CODES)


def as_culet_error(error: Exception) -> CuletError:
    """Return `error` itself, or an InternalError that names it if Culet did not raise it on purpose."""
    return error if isinstance(error, CuletError) else InternalError(f"{type(error).__name__}: {error}")


def error_parts(error: CuletError) -> tuple[str, str, str]:
    """Return the kind, message and hint with which `error_of` makes the same error in another process."""
    return type(error).__name__, error.message, error.hint


def error_of(kind: str, message: str, hint: str = "") -> CuletError:
    """Return the error that another process reported. `kind` names its class. An unknown name gives an InternalError."""
    cls = globals().get(kind)
    if isinstance(cls, type) and issubclass(cls, CuletError):
        return cls(message, hint=hint)
    return InternalError(message, hint=hint)
