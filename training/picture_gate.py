"""The gate's questions about pictures: 200 of them, each with a combination that no training picture has.

    python -m training.picture_gate          writes training/questions/pictures.jsonl

The pictures are drawn from their seeds. They go through Culet's decoding processes, tower and engine, like a server's.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from culet import LLM, SamplingParams
from culet.media.prompt import expand_prompt
from culet.media.reader import MediaReader
from culet.media.sources import pixel_source
from culet.media.spec import read_media_spec
from culet.text.output_reader import ChatReader
from training.data.pictures.chats import IMAGE, gate_picture
from training.data.pictures.questions import is_right

FILE = Path(__file__).parent / "questions" / "pictures.jsonl"
NUM_QUESTIONS = 200
PARAMS = SamplingParams(temperature=0, max_tokens=48)


def choose_questions() -> list[dict[str, Any]]:
    """Return questions of all kinds, about equally many of each."""
    most = -(-NUM_QUESTIONS // 12)  # of a kind; there are twelve
    count: Counter[str] = Counter()
    lines: list[dict[str, Any]] = []
    seed = 0
    while len(lines) < NUM_QUESTIONS:
        _, _, question = gate_picture(seed)
        if count[question.kind] < most:
            count[question.kind] += 1
            lines.append({"seed": seed, "kind": question.kind, "asked": question.text, "wanted": list(question.wanted)})
        seed += 1
    return lines


def read_questions(every: int = 1) -> list[dict[str, Any]]:
    return [json.loads(line) for line in FILE.read_text().splitlines()][::every]


def sees(folder: Path) -> bool:
    """Return whether a checkpoint has a vision tower."""
    return json.loads((folder / "config.json").read_text()).get("vision_config") is not None


def ask_about_pictures(llm: LLM, folder: Path, every: int = 1) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return the shares of right answers, in total and by kind, and the wrong ones."""
    lines = read_questions(every)
    answers = answer(llm, folder, lines)
    right, count, wrong = Counter[str](), Counter[str](), []
    for line, said in zip(lines, answers, strict=True):
        count[line["kind"]] += 1
        if is_right(line["kind"], said, line["wanted"]):
            right[line["kind"]] += 1
        else:
            wrong.append({**line, "said": said})
    shares = {"pictures": right.total() / count.total()}
    return shares | {f"pictures: {kind}": right[kind] / count[kind] for kind in sorted(count)}, wrong


def answer(llm: LLM, folder: Path, lines: list[dict[str, Any]]) -> list[str]:
    """Return the model's answers, through the engine."""
    engine = llm.engine
    spec = read_media_spec(json.loads((folder / "config.json").read_text()), folder)
    reader = MediaReader(spec)
    prompts: dict[str, tuple[int, ...]] = {}
    tokens: dict[str, list[int]] = {}
    try:
        for number, line in enumerate(lines):
            _, pixels, question = gate_picture(line["seed"])
            if question.text != line["asked"]:
                raise ValueError(
                    f"picture {line['seed']}: got {question.text!r}, expected {line['asked']!r}; write the file anew"
                )
            media = reader.read_now([pixel_source(pixels, name=f"picture {line['seed']}")])
            text = engine.chat_template.render([{"role": "user", "content": f"{IMAGE}{line['asked']}"}])
            expanded = expand_prompt(engine.tokenizer.encode(text), media, spec, engine.tokenizer.encode)
            name = f"picture {number}"
            request = engine.rules.make_request(name, expanded.token_ids, PARAMS, media=expanded.spans, items=expanded.items)
            prompts[name], tokens[name] = expanded.token_ids, []
            engine.add(request)
            while engine.has_work:
                for delta in engine.step():
                    tokens[delta.request_id] += delta.token_ids
    finally:
        reader.close()
    return [_text(engine.tokenizer, prompts[name], tokens[name]) for name in prompts]


def _text(tokenizer: Any, prompt: tuple[int, ...], tokens: list[int]) -> str:
    reader = ChatReader(tokenizer, prompt_ids=list(prompt), schemas={})
    reader.push(tokens)
    reader.finish()
    return reader.output().text


def main() -> None:
    """Write the questions."""
    FILE.write_text("".join(json.dumps(line) + "\n" for line in choose_questions()))


if __name__ == "__main__":
    main()
