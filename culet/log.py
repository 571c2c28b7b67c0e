"""The logger, and `chose`, which logs every setting that Culet derives."""

from __future__ import annotations

import json
import logging
import sys
import time

from culet import env

logger = logging.getLogger("culet")


class _JsonLines(logging.Formatter):
    """One JSON object per line: time, level, message, and the `fields` passed as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        entry = {"time": stamp, "level": record.levelname.lower(), "message": record.getMessage()}
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False)


def setup_logging(level: str | None = None, form: str = "text") -> None:
    """Send Culet's log to stderr, as text or as JSON lines. Programs call this. Importing Culet never does."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")
    handler.setFormatter(_JsonLines() if form == "json" else text)
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel((level or env.LOG_LEVEL.get()).upper())


def chose(name: str, value: object, reason: str) -> None:
    """Log a derived setting with its reason."""
    logger.info("%s: %s (%s)", name, value, reason)
