"""The figures of a load, under the names of `vllm bench serve` and in its printed block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median, pstdev
from typing import Any

from culet.bench.serve.client import TimedAnswer
from culet.bench.serve.load import Outcome


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` percent of the values lie, interpolated."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


SERIES = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
    "chat_itl": ("Inter-token Latency of Running Chats", "ITL"),
}


def summarise(outcome: Outcome, percentiles: Sequence[float] = (99.0,)) -> dict[str, Any]:
    """Return every figure under its name in `vllm bench serve`."""
    good, load = outcome.good, outcome.load
    num_input, num_output = sum(answer.input_len for answer in good), sum(answer.output_len for answer in good)
    seconds = outcome.duration_s
    figures: dict[str, Any] = {
        "backend": "openai-chat" if load.is_chat else "openai",
        "model_id": outcome.model,
        "num_prompts": load.num_prompts,
        "request_rate": "inf" if load.request_rate == float("inf") else load.request_rate,
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
        "duration": seconds,
        "completed": len(good),
        "failed": len(outcome.answers) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / seconds,
        "output_throughput": num_output / seconds,
        "total_token_throughput": (num_input + num_output) / seconds,
        **dict(zip(("max_output_tokens_per_s", "max_concurrent_requests"), _peaks(good), strict=True)),
    }
    series: dict[str, list[float]] = {
        "ttft": [answer.ttft_s for answer in good],
        "tpot": [answer.per_token_s for answer in good if answer.output_len > 1],
        "itl": [gap for answer in good for gap in answer.gaps_s],
        "e2el": [answer.latency_s for answer in good],
    }
    if load.num_chats:
        series["chat_itl"] = list(outcome.chat_gaps_s)
        figures["num_chats"] = load.num_chats
        figures["failed_chats"] = len(outcome.chat_errors)
        # An event may bring several tokens, if drafts were accepted. Only the server knows how many.
        generated = outcome.counters.get("generated_tokens")
        num_chat_tokens = len(outcome.chat_gaps_s) if generated is None else max(0.0, generated - num_output)
        figures["chat_output_throughput"] = num_chat_tokens / seconds
    for name, values in series.items():
        figures |= {
            f"mean_{name}_ms": fmean(values) * 1e3 if values else 0.0,
            f"median_{name}_ms": median(values) * 1e3 if values else 0.0,
            f"std_{name}_ms": pstdev(values) * 1e3 if values else 0.0,
        }
        for share in percentiles:
            figures[f"p{share:g}_{name}_ms"] = percentile(values, share) * 1e3 if values else 0.0
    counters = outcome.counters
    if counters.get("prompt_tokens"):
        figures |= {
            "prefix_cache_queried_tokens": int(counters["prompt_tokens"]),
            "prefix_cache_hit_tokens": int(counters.get("cached_tokens", 0)),
            "prefix_cache_hit_rate": 100 * counters.get("cached_tokens", 0.0) / counters["prompt_tokens"],
        }
    if counters.get("drafts"):
        rounds, drafted, accepted = (counters[key] for key in ("drafts", "draft_tokens", "accepted_tokens"))
        figures |= {
            "spec_decode_acceptance_rate": 100 * accepted / max(1.0, drafted),
            "spec_decode_acceptance_length": 1 + accepted / rounds,
            "spec_decode_num_drafts": int(rounds),
            "spec_decode_draft_tokens": int(drafted),
            "spec_decode_accepted_tokens": int(accepted),
        }
    return figures


def _peaks(good: Sequence[TimedAnswer]) -> tuple[float, int]:
    """Return (most events in a second, most requests in flight)."""
    if not good:
        return 0.0, 0
    begin = min(answer.started_at for answer in good)
    per_second: dict[int, int] = {}
    moves: list[tuple[float, int]] = []
    for answer in good:
        moves += [(answer.started_at, 1), (answer.started_at + answer.latency_s, -1)]
        for at in answer.token_times:
            per_second[int(at - begin)] = per_second.get(int(at - begin), 0) + 1
    most = now = 0
    for _, change in sorted(moves):
        now += change
        most = max(most, now)
    return float(max(per_second.values(), default=0)), most


def block(figures: Mapping[str, Any], percentiles: Sequence[float] = (99.0,)) -> str:
    """Format the figures like `vllm bench serve`."""

    def line(name: str, value: float | int | str) -> str:
        return f"{name:<40} {value:<10.2f}" if isinstance(value, float) else f"{name:<40} {value:<10}"

    lines = [f"{' Serving Benchmark Result ':=^50}"]
    lines += [line("Successful requests:", figures["completed"]), line("Failed requests:", figures["failed"])]
    if figures["max_concurrency"] is not None:
        lines.append(line("Maximum request concurrency:", figures["max_concurrency"]))
    if figures["request_rate"] != "inf":
        lines.append(line("Request rate configured (RPS):", float(figures["request_rate"])))
    lines += [
        line("Benchmark duration (s):", figures["duration"]),
        line("Total input tokens:", figures["total_input_tokens"]),
        line("Total generated tokens:", figures["total_output_tokens"]),
        line("Request throughput (req/s):", figures["request_throughput"]),
        line("Output token throughput (tok/s):", figures["output_throughput"]),
        line("Peak output token throughput (tok/s):", figures["max_output_tokens_per_s"]),
        line("Peak concurrent requests:", float(figures["max_concurrent_requests"])),
        line("Total token throughput (tok/s):", figures["total_token_throughput"]),
    ]
    if "num_chats" in figures:
        lines += [
            line("Running chats:", figures["num_chats"]),
            line("Failed chats:", figures["failed_chats"]),
            line("Output of running chats (tok/s):", figures["chat_output_throughput"]),
        ]
    for name, (title, short) in SERIES.items():
        if f"mean_{name}_ms" not in figures:
            continue
        lines.append(f"{title:-^50}")
        lines += [line(f"Mean {short} (ms):", figures[f"mean_{name}_ms"])]
        lines += [line(f"Median {short} (ms):", figures[f"median_{name}_ms"])]
        lines += [line(f"P{share:g} {short} (ms):", figures[f"p{share:g}_{name}_ms"]) for share in percentiles]
    if "prefix_cache_hit_rate" in figures:
        lines.append(f"{'Prefix Cache':-^50}")
        lines += [
            line("Hit rate (%):", figures["prefix_cache_hit_rate"]),
            line("Hit tokens:", figures["prefix_cache_hit_tokens"]),
            line("Queried tokens:", figures["prefix_cache_queried_tokens"]),
        ]
    if "spec_decode_num_drafts" in figures:
        lines.append(f"{'Speculative Decoding':-^50}")
        lines += [
            line("Acceptance rate (%):", figures["spec_decode_acceptance_rate"]),
            line("Acceptance length:", figures["spec_decode_acceptance_length"]),
            line("Drafts:", figures["spec_decode_num_drafts"]),
            line("Draft tokens:", figures["spec_decode_draft_tokens"]),
            line("Accepted tokens:", figures["spec_decode_accepted_tokens"]),
        ]
    return "\n".join([*lines, "=" * 50])


def details(outcome: Outcome) -> dict[str, Any]:
    """Return the figures of every answer, for further analysis."""
    return {
        "input_lens": [answer.input_len for answer in outcome.answers],
        "output_lens": [answer.output_len for answer in outcome.answers],
        "ttfts": [answer.ttft_s for answer in outcome.answers],
        "itls": [answer.gaps_s for answer in outcome.answers],
        "errors": [answer.error for answer in outcome.answers],
    }
