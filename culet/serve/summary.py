"""What was chosen and why, once everything stands: printed at the start, on stderr."""

from __future__ import annotations

import logging

from culet.log import logger
from culet.serve.service import Service


def say_ready(service: Service, port: int) -> None:
    """Log a summary: model, plan, memory, limits and address."""
    facts = service.engine.facts
    assert facts is not None
    settings, limits = service.settings, service.limits
    logger.info("model: %s on %s in %s", ", ".join(service.names), facts.device, facts.dtype)
    for group in facts.groups:
        window = "all keys" if group.window is None else f"window {group.window}"
        logger.info(
            "  %s: %d layers, %s, pages of %d tokens, attention by %s (%s)",
            group.name,
            group.num_layers,
            window,
            group.page_tokens,
            group.backend,
            group.why,
        )
    gigabytes = facts.num_pages * facts.page_bytes / 1e9
    logger.info("cache: %d pages, %.2f GB; context: %d tokens", facts.num_pages, gigabytes, facts.max_model_len)
    logger.info(
        "at once: %d sequences, %d more wait; a request: up to %d MB, n %d, %g s",
        facts.max_num_seqs,
        facts.max_queue_len,
        limits.body_mb,
        limits.n,
        settings.request_timeout,
    )
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    logger.info("ready at http://%s:%d (OpenAI API under /v1)", host, port)
    if not service.api_keys:
        level = logging.INFO if settings.host in ("127.0.0.1", "::1", "localhost") else logging.WARNING
        logger.log(level, "no API key is set: whoever can reach this address may use the model")
