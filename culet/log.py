"""The logger, and `chose` for every setting that Culet derives instead of the user."""

from __future__ import annotations

import logging
import sys

from culet import env

logger = logging.getLogger("culet")


def setup_logging(level: str | None = None) -> None:
    """Send Culet's log to stderr; stdout is for data. Called by the command line, never by a library import."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel((level or env.LOG_LEVEL.get()).upper())


def chose(name: str, value: object, reason: str) -> None:
    """Log a derived setting with the reason for it: no choice is made in silence."""
    logger.info("%s: %s (%s)", name, value, reason)
