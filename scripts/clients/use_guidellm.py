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
        command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"]
        command += ["--backend", f"kind=openai_http,target={URL},model={MODEL}", "--profile", "kind=synchronous"]
        command += ["--tokenizer", f"kind=huggingface_auto,model={sys.argv[1]}", "--constraint", "kind=max_requests,count=4"]
        command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16", "--output", f"kind=json,path={output}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
        assert done.returncode == 0, (done.stdout + done.stderr)[-1500:]
        report = json.loads(output.read_text())
    (result,) = report["benchmarks"]
    totals = result.get("request_totals") or result["metrics"]["request_totals"]
    assert totals["successful"] == 4, totals


run(stream=benchmark)
