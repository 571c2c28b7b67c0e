"""Time a start in its own process: python -m culet.bench.start '{"model": "random:31B"}'

Prints a JSON object with three durations in seconds. `import_s` is the time to import torch and Culet. `ready_s` is the time
from then until the first request is accepted, broken down in `parts`. `first_token_s` is the time from then until that
request's first token, and shows whether work was deferred.
"""

from __future__ import annotations

import json
import sys
import time

PROMPT_LEN = 64


def main() -> int:
    began = time.perf_counter()
    from culet.config import build_config
    from culet.engine.llm import LLM
    from culet.errors import CuletError, exit_code
    from culet.log import setup_logging
    from culet.types import SamplingParams

    setup_logging()
    imported = time.perf_counter()
    try:
        with LLM.from_config(build_config(json.loads(sys.argv[1]))) as llm:
            prompt = [token_id % llm.engine.spec.vocab_size for token_id in range(1000, 1000 + PROMPT_LEN)]
            stream = llm.stream(prompt, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
            ready = time.perf_counter()
            next(stream)
            first = time.perf_counter()
            stream.close()
            parts = llm.engine.start_times.parts
    except CuletError as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_code(error)
    report = {"import_s": imported - began, "ready_s": ready - imported, "first_token_s": first - ready, "parts": parts}
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
