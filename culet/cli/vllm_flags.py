"""Flags of `vllm serve` that Culet does not have, and what to do instead. Errors and the guide show these sentences."""

from __future__ import annotations

from collections.abc import Iterable

import click

from culet.errors import ConfigError

# (flags, advice). The advice continues "hint: ".
REPLACED: tuple[tuple[tuple[str, ...], str], ...] = (
    (("-tp",), "use --tensor-parallel-size"),
    (("-dp",), "use --data-parallel-size"),
    (
        ("--pipeline-parallel-size", "-pp", "--enable-expert-parallel"),
        "use --tensor-parallel-size, which also splits the experts",
    ),
    (
        ("--data-parallel-size-local", "-dpl"),
        "use --data-parallel-size, which counts the engines of this machine; every other machine needs its own server",
    ),
    (
        ("--decode-context-parallel-size", "-dcp"),
        "use --tensor-parallel-size, which also divides the cache of the global layers by tokens if they have too few KV heads",
    ),
    (("--disable-custom-all-reduce",), "use --all-reduce nccl"),
    (("--max-logprobs",), "use --limits logprobs=N"),
    (("--enable-log-requests",), "omit it: --log-requests is on by default"),
    (
        ("--no-enable-log-requests", "--disable-uvicorn-access-log", "--uvicorn-log-level"),
        "use --no-log-requests, or set CULET_LOG_LEVEL=warning",
    ),
    (("--otlp-traces-endpoint",), "set the environment variable OTEL_EXPORTER_OTLP_ENDPOINT"),
    (("--download-dir",), "set the environment variable HF_HOME"),
    (("--hf-token",), "set the environment variable HF_TOKEN"),
    (("--default-chat-template-kwargs",), "use --enable-thinking; requests may send chat_template_kwargs"),
    (("--num-gpu-blocks-override",), "use --kv-cache-memory-bytes"),
    (("--kv-offloading-size", "--kv-offloading-backend"), "use --swap-space, which is for preempted sequences only"),
    (("--speculative-model", "--num-speculative-tokens"), "use --speculative-config with a JSON object"),
    (
        ("--max-num-partial-prefills", "--max-long-partial-prefills", "--long-prefill-token-threshold"),
        "use --max-step-ms, which bounds how long a prompt holds up running answers",
    ),
    (("--no-enable-chunked-prefill",), "use a larger --max-num-batched-tokens; longer prompts are always computed in chunks"),
    (("--mm-processor-cache-gb", "--disable-mm-preprocessor-cache"), "use --media-cache-memory-bytes"),
    (("--mm-processor-kwargs", "--media-io-kwargs"), "send mm_processor_kwargs with the request"),
    (("--enable-force-include-usage",), "send stream_options.include_usage with the request"),
    (
        ("--override-generation-config",),
        "send the values with the request, or change generation_config.json in the model's folder",
    ),
    (("--api-server-count",), "use --text-workers to tokenize more prompts at the same time"),
    (("--allowed-local-media-path",), "send files as data: URLs; the server reads no paths"),
    (("--hf-overrides", "--rope-scaling", "--rope-theta"), "change config.json in the model's folder"),
)
UNNEEDED: tuple[tuple[tuple[str, ...], str], ...] = (
    (("--task", "--runner", "--convert", "--model-impl"), "omit it: Culet only generates text, with its own model code"),
    (("--generation-config",), "omit it: the defaults are those in the model's generation_config.json"),
    (("--seed",), "omit it: each request may send a seed"),
    (("--load-format", "--config-format"), "omit it: Culet detects the format; MODEL may be random:E4B for random weights"),
    (
        ("--tokenizer", "--tokenizer-mode", "--tokenizer-revision", "--code-revision"),
        "omit it: the tokenizer comes with the model, and code from checkpoints is never run",
    ),
    (("--block-size", "--prefix-caching-hash-algo"), "omit it: Culet chooses the pages of its cache"),
    (
        ("--disable-hybrid-kv-cache-manager", "--disable-sliding-window", "--disable-cascade-attn"),
        "omit it: there is no such mode",
    ),
    (("--scheduling-policy",), "omit it: requests may send a priority"),
    (
        ("--guided-decoding-backend", "--structured-outputs-config"),
        "omit it: JSON schemas, grammars and patterns need no setting",
    ),
    (("--enable-reasoning",), "omit it: thoughts are always separated from the answer"),
    (
        ("--compilation-config", "-O", "--optimization-level", "--cuda-graph-sizes", "--max-seq-len-to-capture"),
        "omit it: CUDA graphs need no setting; --enforce-eager turns them off",
    ),
    (
        ("--data-parallel-rank", "-dpn", "--data-parallel-backend", "-dpb"),
        "omit it: --data-parallel-size starts all engines of this machine; for engines that scale on many, see Ray Serve",
    ),
    (("--distributed-executor-backend",), "omit it: --tensor-parallel-size and --data-parallel-size start their own processes"),
    (("--enable-prompt-tokens-details",), "omit it: usage always counts cached tokens"),
    (("--enable-tokenizer-info-endpoint",), "omit it: /tokenizer_info is always there"),
    (("--disable-log-stats", "--disable-frontend-multiprocessing", "--max-log-len"), "omit it: there is nothing to turn off"),
    (("--calculate-kv-scales",), "omit it: an fp8 cache needs no scales"),
)
UNSUPPORTED: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("--enable-lora", "--lora-modules", "--max-loras", "--max-lora-rank"),
        "Culet does not support LoRA adapters: merge the adapter into the weights and serve the merged folder",
    ),
    (
        ("--cpu-offload-gb",),
        "Culet does not move weights to the CPU: try --quantization, and see `culet plan`",
    ),
    (
        ("--data-parallel-address", "-dpa", "--nnodes", "--node-rank", "--master-addr", "--master-port"),
        "an engine of Culet runs on one machine: start a server on each, behind a router",
    ),
    (("--kv-transfer-config",), "Culet computes prompts and answers in the same engine"),
    (("--enable-sleep-mode",), "Culet has no sleep mode: stop the server instead, since it starts in seconds"),
    (("--enable-prompt-embeds", "--logits-processors", "--stream-interval"), "Culet does not support this"),
    (("--root-path", "--middleware", "--log-config-file"), "Culet does not support this: put a proxy in front of it"),
)

ADVICE = {flag: advice for part in (REPLACED, UNNEEDED, UNSUPPORTED) for flags, advice in part for flag in flags}


class VllmCommand(click.Command):
    """A command that answers a flag of vLLM that it does not have with advice."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)  # click empties its list
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            flag = _as_typed(error.option_name, words)
            if advice := advice_on(flag, (name for option in self.params for name in option.opts)):
                raise ConfigError(f"{flag}: Culet does not have this flag of vLLM", hint=advice) from error
            raise


def advice_on(flag: str, known: Iterable[str]) -> str:
    """Return what to do instead of using this flag, or an empty text."""
    group, dot, _ = flag.partition(".")
    if dot and group in known:
        return f"pass one JSON object to {group}"
    return ADVICE.get(group, "")


def _as_typed(name: str, words: list[str]) -> str:
    """Return the whole word `-tp` for the `-t` in click's error."""
    if name.startswith("--"):
        return name
    return next((word for word in words if word.startswith(name) and word in ADVICE), name)
