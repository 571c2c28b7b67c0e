"""The quality gate: what the built-in model must reach before its weights are released.

python -m training.gate                          the built-in model; exit code 1 if a goal is missed
python -m training.gate --model out/training/embedded/target --json out/gate.json --golden training/golden.md

Questions, tool calls, JSON answers and open prompts are in `training/questions`. None of their phrasings is in the training
text (`training/check_overlap.py` checks that). Pictures are drawn from seeds, with combinations that training never shows.
All answers are greedy, in float32, through Culet's engine.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from culet import LLM, SamplingParams
from culet.config import BUILT_IN
from culet.models.folder import find_folder
from culet.text.output_pieces import Output
from culet.text.output_reader import ChatReader
from culet.text.tool_schema import tool_schemas
from training.learning.batches import Part
from training.learning.prompts import cut_prompts
from training.models.acceptance import Output as Written
from training.picture_gate import ask_about_pictures, sees
from training.scoring import is_right, is_valid_call, is_valid_json

QUESTIONS = Path(__file__).parent / "questions"
GREEDY = SamplingParams(temperature=0, max_tokens=160)
GOALS = {
    "questions": 0.70,
    "tool calls": 0.90,
    "no tool where none fits": 0.90,
    "JSON": 0.95,
    "answers ended": 0.95,
    "pictures": 0.85,
}
DRAFTING = "tokens emitted per verify"
DRAFTING_GOALS = {"mtp": 2.3, "dflash": 3.0}
DRAFTERS = {"mtp": "assistant", "dflash": "dflash"}  # method -> folder next to the target's
NUM_DRAFTED = 144  # held-out chats; with 48, a single part moved the result by a tenth
UNLIKE = "answers unlike transformers'"
PRECISIONS = "quantization", "head_quantization"  # settings that change the weights
MAX_LOGIT_ERROR = 1e-4
MAX_TIE = 1e-4  # logits closer than this count as tied


@dataclass
class Scores:
    """Shares of right answers, with details."""

    shares: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    def missed(self) -> list[str]:
        """Return the goals that were measured and missed."""
        low = [
            f"{name}: {self.shares[name]:.3f}, goal {goal}" for name, goal in GOALS.items() if self.shares.get(name, 1) < goal
        ]
        error = self.details.get("largest difference from transformers")
        if error is not None and error > MAX_LOGIT_ERROR:
            low.append(f"log-probabilities differ from transformers' by {error:.1e}, at most {MAX_LOGIT_ERROR:.0e} is allowed")
        for name, emitted in self.details.get(DRAFTING, {}).items():
            goal = DRAFTING_GOALS[name.partition(" ")[0]]
            if emitted < goal:
                low.append(f"{DRAFTING}: {name}: {emitted}, goal {goal}")
        unlike = self.details.get(UNLIKE, 0)
        if unlike:
            low.append(f"{unlike} answers differ from transformers'")
        return low


def read_lines(name: str, every: int = 1) -> list[dict[str, Any]]:
    """Read a file of questions, or every second, third, ... of them."""
    lines = [json.loads(line) for line in (QUESTIONS / f"{name}.jsonl").read_text().splitlines() if line.strip()]
    return lines[::every]


class Asker:
    """Puts conversations to a model, all in one batch. With `every`, it asks every second, third, ... question only."""

    def __init__(self, llm: LLM, every: int = 1) -> None:
        self.llm = llm
        self.every = every

    def prompt(self, line: dict[str, Any]) -> list[int]:
        engine = self.llm.engine
        text = engine.chat_template.render(
            line["messages"], tools=line.get("tools"), enable_thinking=line.get("thinking", False)
        )
        return engine.tokenizer.encode(text)

    def ask(self, lines: Sequence[dict[str, Any]]) -> list[tuple[Output, str]]:
        """Return the model's answer to each line, and its finish reason."""
        prompts = [self.prompt(line) for line in lines]
        answers = []
        for line, prompt, result in zip(lines, prompts, self.llm.generate(prompts, GREEDY), strict=True):
            schemas = tool_schemas(line.get("tools"))
            reader = ChatReader(self.llm.engine.tokenizer, prompt_ids=prompt, schemas=schemas)
            reader.push(result.token_ids)
            reader.finish()
            answers.append((reader.output(), result.finish_reason))
        return answers


def ask_questions(asker: Asker, scores: Scores) -> None:
    lines = read_lines("questions", asker.every)
    answers = asker.ask([{"messages": [{"role": "user", "content": line["question"]}]} for line in lines])
    right, asked, wrong = Counter[str](), Counter[str](), []
    for line, (output, _) in zip(lines, answers, strict=True):
        asked[line["kind"]] += 1
        if is_right(line["kind"], output.text, line["answers"]):
            right[line["kind"]] += 1
        else:
            wrong.append({"question": line["question"], "said": output.text, "wanted": line["answers"]})
    scores.shares["questions"] = right.total() / asked.total()
    scores.shares |= {f"questions: {kind}": right[kind] / count for kind, count in asked.items()}
    scores.shares["answers ended"] = sum(reason == "stop" for _, reason in answers) / len(answers)
    scores.details["wrong answers"] = wrong


def ask_for_tools(asker: Asker, scores: Scores) -> None:
    lines = read_lines("tools", asker.every)
    valid = exact = fitting = silent = unfitting = 0
    wrong = []
    for line, (output, _) in zip(lines, asker.ask(lines), strict=True):
        expected, calls = line["expect"], output.tool_calls
        if expected is None:
            unfitting += 1
            silent += not calls and not output.num_malformed
            is_good = not calls and not output.num_malformed
        else:
            fitting += 1
            is_good = (
                bool(calls)
                and not output.num_malformed
                and all(is_valid_call(call.name, call.arguments, line["tools"]) for call in calls)
            )
            valid += is_good
            exact += is_good and (calls[0].name, calls[0].arguments) == (expected["name"], expected.get("arguments"))
        if not is_good:
            said = [f"{call.name}({call.arguments_json})" for call in calls]
            wrong.append({"asked": line["messages"][-1]["content"], "called": said, "said": output.text})
    scores.shares |= {"tool calls": valid / fitting, "tool calls, all arguments right": exact / fitting}
    scores.shares["no tool where none fits"] = silent / unfitting
    scores.details["wrong tool calls"] = wrong


def ask_for_json(asker: Asker, scores: Scores) -> None:
    lines = read_lines("json", asker.every)
    answers = [output.text for output, _ in asker.ask(lines)]
    is_valid = [is_valid_json(answer, line["schema"]) for line, answer in zip(lines, answers, strict=True)]
    scores.shares["JSON"] = sum(is_valid) / len(lines)
    scores.details["wrong JSON"] = [answer for answer, good in zip(answers, is_valid, strict=True) if not good]


def play_open(asker: Asker) -> list[list[dict[str, str]]]:
    """Return the open conversations with the model's answers."""
    conversations = [line["turns"] for line in read_lines("open", asker.every)]
    played: list[list[dict[str, str]]] = [[] for _ in conversations]
    for turn in range(max(map(len, conversations))):
        unfinished = [number for number, conversation in enumerate(conversations) if turn < len(conversation)]
        for number in unfinished:
            played[number].append({"role": "user", "content": conversations[number][turn]})
        for number, (output, _) in zip(
            unfinished, asker.ask([{"messages": played[number]} for number in unfinished]), strict=True
        ):
            played[number].append({"role": "assistant", "content": output.text})
    return played


def golden_text(played: Sequence[Sequence[dict[str, str]]]) -> str:
    """Return the conversations as Markdown."""
    parts = ["# The built-in model's answers to thirty open prompts (temperature 0)", ""]
    for number, conversation in enumerate(played, start=1):
        parts.append(f"## {number}")
        parts += [
            f"**{'You' if turn['role'] == 'user' else turn['role'].title()}:** {turn['content']}\n" for turn in conversation
        ]
    return "\n".join(parts).replace("**Assistant:**", "**Culet:**")


def held_out() -> dict[str, Part]:
    """Return held-out documents by part."""
    stored = np.load(QUESTIONS / "held_out.npz")
    names = sorted({key.partition(".")[0] for key in stored.files})
    return {name: Part(name, *(stored[f"{name}.{kind}"] for kind in ("tokens", "ends", "learnt"))) for name in names}


def _own_logprobs(llm: LLM, documents: Sequence[Sequence[int]]) -> list[list[float]]:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    results = llm.generate([list(document) for document in documents], params)
    logprobs = []
    for document, result in zip(documents, results, strict=True):
        assert result.prompt_logprobs is not None
        logprobs.append([entry[token] for token, entry in zip(document[1:], result.prompt_logprobs, strict=True)])
    return logprobs


def measure_perplexity(llm: LLM, scores: Scores) -> None:
    """Measure each held-out part's perplexity by Culet's log-probabilities. In chats, only the model's turns count."""
    table = {}
    for name, part in held_out().items():
        learnt = np.ones(len(part.tokens), bool) if part.learnt is None else part.learnt
        masks = np.split(learnt, part.ends[:-1])
        documents = zip(_own_logprobs(llm, part.documents()), masks, strict=True)
        logprobs = [
            value for values, mask in documents for value, is_written in zip(values, mask[1:], strict=True) if is_written
        ]
        table[name] = round(math.exp(-sum(logprobs) / len(logprobs)), 3)
    scores.details["held-out perplexity"] = table


def compare_with_transformers(llm: LLM, folder: Path, asker: Asker, scores: Scores) -> None:
    """Compare log-probabilities of held-out text and greedy answers (up to ties) with transformers."""
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    documents = [part.documents()[0] for part in held_out().values()][:: asker.every]
    largest = 0.0
    with torch.inference_mode():
        for document, own in zip(documents, _own_logprobs(llm, documents), strict=True):
            logits = peer(torch.tensor([document])).logits[0, :-1].log_softmax(-1)
            theirs = logits.gather(1, torch.tensor(document[1:])[:, None])[:, 0]
            largest = max(largest, float((theirs - torch.tensor(own)).abs().max()))
        lines = read_lines("open", asker.every)
        prompts = [asker.prompt({"messages": [{"role": "user", "content": line["turns"][0]}]}) for line in lines]
        unlike = sum(
            _is_unlike(peer, prompt, result) for prompt, result in zip(prompts, llm.generate(prompts, GREEDY), strict=True)
        )
    scores.details |= {"largest difference from transformers": largest, UNLIKE: unlike}
    scores.details["answers compared with transformers'"] = len(prompts)


def _is_unlike(peer: Any, prompt: Sequence[int], result: Any) -> bool:
    """Return whether a token of the answer differs from transformers' choice by more than a tie."""
    ids = [*prompt, *result.token_ids]
    logits = peer(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(list(result.token_ids))[:, None])[:, 0]
    return bool((logits.max(-1).values - chosen > MAX_TIE).any())


def measure_drafting(model: str, scores: Scores, settings: Mapping[str, Any]) -> None:
    """Measure the tokens that the engine emits per verify over held-out chats, without repetitive outputs."""
    parts = held_out()
    prompts = cut_prompts(parts, dict.fromkeys(parts, 1.0), NUM_DRAFTED, longest=512, seed=7, chats_only=True)
    folder = find_folder(model).parent
    emitted = {}
    for temperature in (0.0, 1.0):
        params = [SamplingParams(temperature=temperature, max_tokens=160, seed=number) for number in range(len(prompts))]
        with LLM(model, **settings) as plain:
            written = plain.generate(prompts, params)
        kept = [index for index, result in enumerate(written) if not Written(prompts[index], result.token_ids).is_repetitive]
        for method, name in DRAFTERS.items():
            choice = {"method": method, "model": str(folder / name), "adaptive": False, "probe": False}
            with LLM(model, **settings, speculative_config=json.dumps(choice)) as llm:
                results = llm.generate([prompts[index] for index in kept], [params[index] for index in kept])
                verifies = llm.engine.stats().counters.verifies
            drawn = sum(len(result.token_ids) - 1 for result in results)  # the first token comes with the prompt
            emitted[f"{method} at temperature {temperature:g}"] = round(drawn / verifies, 3)
    scores.details[DRAFTING] = emitted
    scores.details["chats drafted, and left out as repetitive"] = [len(prompts), len(prompts) - len(kept)]


def measure_speed(llm: LLM, scores: Scores) -> None:
    """Measure the output tokens per second of one chat and of eight concurrent chats on this machine."""
    asker = Asker(llm)
    lines = [{"messages": [{"role": "user", "content": f"Tell me a story about the number {number}."}]} for number in range(8)]
    prompts = [asker.prompt(line) for line in lines]
    params = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
    speed = {}
    for count in (1, 8):
        best = math.inf
        for _ in range(3):
            began = time.perf_counter()
            llm.generate(prompts[:count], params)
            best = min(best, time.perf_counter() - began)
        speed[f"{count} at once"] = round(count * 128 / best, 1)
    scores.details["tokens per second"] = speed | {"threads": torch.get_num_threads()}


def ask_pictures(llm: LLM, folder: Path, scores: Scores, every: int) -> None:
    """Ask about held-out pictures, if the model has a vision tower."""
    if not sees(folder):
        scores.details["pictures"] = "not asked, because the model has no vision tower"
        return
    shares, wrong = ask_about_pictures(llm, folder, every)
    scores.shares |= shares
    scores.details["wrong answers about pictures"] = wrong


def run_gate(model: str, *, parts: Iterable[str], golden: Path | None = None, every: int = 1, **precisions: str) -> Scores:
    """Run the named parts on a model, with every question or with every second, third, ... one.

    `precisions` are the settings `quantization` and `head_quantization`.
    """
    scores, settings = Scores(), {"device": "cpu", "dtype": "float32", **precisions}
    with LLM(model, **settings) as llm:
        asker = Asker(llm, every)
        steps = {
            "questions": lambda: ask_questions(asker, scores),
            "tools": lambda: ask_for_tools(asker, scores),
            "json": lambda: ask_for_json(asker, scores),
            "perplexity": lambda: measure_perplexity(llm, scores),
            "transformers": lambda: compare_with_transformers(llm, find_folder(model), asker, scores),
            "drafting": lambda: measure_drafting(model, scores, settings),
            "speed": lambda: measure_speed(llm, scores),
            "pictures": lambda: ask_pictures(llm, find_folder(model), scores, every),
        }
        for part in parts:
            if part == "open":
                played = play_open(asker)
                scores.details["conversations"] = played
                if golden is not None:
                    golden.write_text(golden_text(played))
            else:
                steps[part]()
    return scores


PARTS = ("questions", "tools", "json", "open", "perplexity", "transformers", "drafting", "speed", "pictures")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m training.gate", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default=BUILT_IN, help="folder of a checkpoint (default: the built-in model)")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"which of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--json", type=Path, dest="json_file", help="write all results to this file")
    parser.add_argument("--golden", type=Path, help="write the open conversations to this file as Markdown")
    for name in PRECISIONS:
        parser.add_argument(f"--{name.replace('_', '-')}", default="auto", help=f"{name} of the model (default: auto)")
    given = parser.parse_args(arguments)
    precisions = {name: getattr(given, name) for name in PRECISIONS}
    scores = run_gate(given.model, parts=given.parts.split(","), golden=given.golden, **precisions)
    if given.json_file:
        given.json_file.write_text(json.dumps(asdict(scores), indent=1, ensure_ascii=False) + "\n")
    for name, share in scores.shares.items():
        print(f"{name:40}{share:8.3f}" + (f"   goal {GOALS[name]}" if name in GOALS else ""))
    for name, value in scores.details.items():
        if not isinstance(value, list):
            print(f"{name}: {value}")
    missed = scores.missed()
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
