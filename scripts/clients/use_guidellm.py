"""GuideLLM: a short benchmark of streamed chat answers. The argument is a folder with the model's tokenizer."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import MODEL, URL, run


def benchmark() -> None:
    with tempfile.TemporaryDirectory() as name:
        output = Path(name) / "report.json"
        command = [str(Path(sys.executable).with_name("guidellm")), "benchmark", "run", "--target", URL, "--model", MODEL]
        command += ["--processor", sys.argv[1], "--data", "prompt_tokens=32,output_tokens=16", "--profile", "synchronous"]
        command += ["--max-requests", "4", "--output-path", str(output), "--disable-console-interactive"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, (done.stdout + done.stderr)[-1500:]
        report = json.loads(output.read_text())
    (result,) = report["benchmarks"]
    totals = result.get("request_totals") or result["metrics"]["request_totals"]
    assert totals["successful"] == 4, totals


run(stream=benchmark)
