"""Every exception Culet raises on purpose.

CuletError                   what failed, got and expected; `hint` names the fix
├── UserError                the caller can fix it: exit code 1
│   ├── ConfigError          a flag, field or combination that cannot be served
│   ├── CheckpointError      a model folder that cannot be read, or does not hold what it should
│   ├── UnsupportedError     asked for something Culet does not do (yet)
│   ├── BadRequest           a request with a bad field
│   └── ContextTooLong       a prompt, or prompt + max_tokens, beyond the model or the cache
├── CapacityError            the caller may try again: exit code 1
│   ├── QueueFull            too many requests waiting
│   ├── TimedOut             a request that took longer than it may
│   └── OutOfPages           the arena has no page left (handled by preemption; never reaches users)
└── InternalError            we failed: exit code 2
    └── WorkerDied           the engine or a worker process is gone

`HTTP_STATUS` and `exit_code` are the only mapping to statuses and exit codes.
"""

from __future__ import annotations


class CuletError(Exception):
    """Base of all: one line that says what failed, and a hint that names the fix."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class UserError(CuletError):
    """Something the caller can fix."""


class ConfigError(UserError):
    """A setting, or a combination of settings, that cannot be served."""


class CheckpointError(UserError):
    """A model folder that cannot be read or does not hold what it should."""


class UnsupportedError(UserError):
    """Something Culet does not do."""


class BadRequest(UserError):
    """A request with a bad field."""


class ContextTooLong(UserError):
    """A request that can never fit the model's context or the cache."""


class CapacityError(CuletError):
    """No room now; the caller may try again."""


class QueueFull(CapacityError):
    """The waiting queue is at its bound."""


class TimedOut(CapacityError):
    """A request took longer than it may."""


class OutOfPages(CapacityError):
    """The arena has fewer free pages than asked for."""


class InternalError(CuletError):
    """A fault of ours."""


class WorkerDied(InternalError):
    """The engine or a worker process is gone."""


# Nearest class in the error's own tree wins, so a subclass inherits its parent's status.
HTTP_STATUS: dict[type[CuletError], int] = {
    UserError: 400,
    CapacityError: 429,
    TimedOut: 504,
    InternalError: 500,
    WorkerDied: 503,
}


def http_status(error: CuletError) -> int:
    """The HTTP status that stands for `error`."""
    return next(HTTP_STATUS[cls] for cls in type(error).__mro__ if cls in HTTP_STATUS)


def exit_code(error: CuletError) -> int:
    """1 if the user can fix it, 2 if we failed."""
    return 2 if isinstance(error, InternalError) else 1
