"""Training at toy size: it learns, it resumes, and both transformers and Culet run what it exports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import culet
from culet import LLM, SamplingParams
from culet.attention.torch_cpu import TorchCPUBackend
from culet.config import DraftChoice
from culet.drafters.base import open_drafter
from culet.models.checkpoint import open_checkpoint
from culet.models.weights import load_model
from tests.models.dflash_oracle import DFlashOracle
from tests.models.draft_rig import DraftRig
from tests.models.harness import Harness
from tests.training.training_pack import FIRST_WORD, write_pack
from training.card import kept_facts, seeing_facts, training_facts
from training.learning.batches import Mixture, Packer, load_parts
from training.learning.loop import Log, Settings, Training, text_source
from training.learning.optimiser import Optimiser, orthogonalised
from training.learning.target_losses import target_loss
from training.models.acceptance import Output, as_batch, count, dflash_drafts, mtp_drafts
from training.models.drafters import Assistant, DFlash
from training.models.export import read_weights
from training.models.generate import Sampling, generate
from training.models.model import Target
from training.models.shapes import MINI_ASSISTANT, MINI_DFLASH, MINI_TARGET
from training.run import capped, main, read_phases
from training.sharpen import FINAL_NORM, sharpen, sharpness_of

F32 = torch.float32
STEPS = "45,20,12"  # of the target, the assistant and the DFlash drafter
CPU = torch.device("cpu")
TEXT = [2, 105, *range(FIRST_WORD + 3, FIRST_WORD + 8), 106, 105, *range(FIRST_WORD + 8, FIRST_WORD + 40)]


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pack(tmp_path_factory.mktemp("pack"))


@pytest.fixture(scope="module")
def work(pack: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All three stages, a few seconds each."""
    folder = tmp_path_factory.mktemp("work")
    options = ["--pack", str(pack), "--work", str(folder), "--mini", "--device", "cpu", "--rows", "4", "--own-prompts", "12"]
    assert main([*options, "--steps", STEPS]) == 0
    return folder


@pytest.fixture(scope="module")
def target(work: Path) -> Target:
    model = Target(MINI_TARGET)
    read_weights(model, work / "embedded" / "target")
    return model


@pytest.fixture(scope="module")
def entries(work: Path) -> list[dict]:
    return [json.loads(line) for line in (work / "log.jsonl").read_text().splitlines()]


def test_it_learns(entries: list[dict]) -> None:
    losses = next(entry["losses"] for entry in entries if entry.get("event") == "held out")
    assert losses["chat"] < 1.5, "counting is not learnt"
    emitted = {(e["stage"], e["temperature"]): e["tokens_per_verify"] for e in entries if e.get("event") == "acceptance"}
    assert set(emitted) == {(stage, temperature) for stage in ("assistant", "dflash") for temperature in (0.0, 1.0)}
    assert emitted["assistant", 0.0] > 1.2


def test_a_finished_stage_is_skipped(work: Path, pack: Path, entries: list[dict]) -> None:
    before = (work / "embedded/target/model.safetensors").stat().st_mtime_ns
    options = ["--pack", str(pack), "--work", str(work), "--mini", "--device", "cpu", "--stages", "target"]
    assert main([*options, "--rows", "4", "--steps", STEPS]) == 0
    assert (work / "embedded/target/model.safetensors").stat().st_mtime_ns == before


def test_continues_from_checkpoints(work: Path, pack: Path, entries: list[dict], tmp_path: Path) -> None:
    """After one step the loss is still low. A new model would be at log(832) = 6.7."""
    options = ["--pack", str(pack), "--work", str(tmp_path), "--mini", "--device", "cpu", "--rows", "8", "--stages", "target"]
    more = ["--start-from", str(work / "embedded"), "--last-share", "1", "--rate", "0.5"]
    assert main([*options, "--steps", "1,1,1", *more]) == 0
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    before, after = (next(e["losses"] for e in log if e.get("event") == "held out") for log in (entries, lines))
    assert after["chat"] < before["chat"] + 1


def test_the_last_mixture_may_be_the_only_one(pack: Path) -> None:
    parts = load_parts(pack / "train")
    main_phase, last_phase = read_phases(pack, parts, 1e6, 0.3)
    assert (main_phase.learn_all, last_phase.learn_all) == (True, False)
    [alone] = read_phases(pack, parts, 1e6, 1.0)
    assert not alone.learn_all


def test_a_written_target_is_sharpened(work: Path, tmp_path: Path) -> None:
    shutil.copytree(work, tmp_path / "run")
    path = tmp_path / "run/embedded/target/model.safetensors"
    before, was = load_file(path), sharpness_of(tmp_path / "run")
    sharpen(tmp_path / "run", 2 * was)
    after = load_file(path)
    assert sharpness_of(tmp_path / "run") == 2 * was
    assert torch.equal(after[FINAL_NORM], 2 * before[FINAL_NORM])
    assert all(torch.equal(after[name], before[name]) for name in before if name != FINAL_NORM)


def test_the_card_keeps_what_the_runs_continued() -> None:
    card = (Path(culet.__file__).parent / "embedded/README.md").read_text()
    kept = kept_facts(card)
    assert kept["text"].startswith("| part | documents |")
    assert kept["training"].startswith("| run | stage |")
    assert kept["sharpness"] == "1.8"
    assert all(text in card for text in kept.values())


def test_the_card_lists_what_taught_seeing() -> None:
    steps = [{"stage": "see", "step": step, "seconds": 2.0, "loss": 1 / step} for step in (1, 2)]
    ends = [{"stage": "see", "event": "done", "pictures": 1200}, {"stage": "see", "event": "checked", "right": {"all": 0.5}}]
    drafter = {"stage": "dflash", "step": 3, "seconds": 1.0, "loss": 0.3}
    *_, first, second = seeing_facts([[*steps, *ends, drafter]])
    assert first == "| 1 | tower and decoder | 2 | 2.0 | 1,200 | 0.5 | 50.0% |"
    assert second == "| 1 | DFlash drafter | 3 | 1.0 |  | 0.3 |  |"


def test_the_card_lists_every_run() -> None:
    step = {"stage": "target", "step": 50, "seconds": 2.0, "tokens": 1000, "loss": 1.5}
    log = [{"event": "epochs"}, step, step | {"step": 100}, {"event": "epochs"}, step | {"loss": 0.5}, {"event": "epochs"}]
    rows = [line.split(" | ") for line in training_facts(log)[2:]]
    assert [(row[0], row[2], row[5]) for row in rows] == [("| 1", "100", "1.5 |"), ("| 2", "50", "0.5 |")]


@torch.no_grad()
def test_logits_are_those_of_transformers(work: Path, target: Target) -> None:
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(work / "embedded/target", dtype=F32).eval()
    ids = torch.randint(5, 800, (3, 4 * MINI_TARGET.window), generator=torch.Generator().manual_seed(1))
    ours = target.logits(target(ids, torch.zeros_like(ids), F32).hidden_BTD)
    torch.testing.assert_close(ours, oracle(ids).logits, atol=1e-4, rtol=0)


@torch.no_grad()
def test_documents_of_a_row_do_not_see_each_other(target: Target) -> None:
    a, b = TEXT[:13], TEXT[5:24]
    length = 4 * MINI_TARGET.window
    packed = torch.tensor([[*a, *b, *[0] * (length - len(a) - len(b))]])
    first = torch.tensor([[0] * len(a) + [len(a)] * len(b) + list(range(len(a) + len(b), length))])
    alone = torch.tensor([[*b, *[0] * (length - len(b))]])
    inside = target(packed, first, F32).hidden_BTD[0, len(a) : len(a) + len(b)]
    torch.testing.assert_close(inside, target(alone, torch.zeros_like(alone), F32).hidden_BTD[0, : len(b)], atol=1e-4, rtol=0)


def test_culet_writes_what_training_writes(work: Path, target: Target) -> None:
    prompts = [TEXT[:size] for size in (9, 14, 30)]
    ours = generate(target, prompts, max_new=40, sampling=Sampling(0.0), dtype=F32)
    with LLM(str(work / "embedded/target"), device="cpu", dtype="float32") as llm:
        results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=40))
    assert [list(result.token_ids) for result in results] == ours


def test_mtp_drafts_are_those_of_culet(work: Path, target: Target) -> None:
    assistant = Assistant(MINI_ASSISTANT, MINI_TARGET)
    read_weights(assistant, work / "embedded/assistant")
    batch = as_batch([Output(TEXT, [])], 4 * MINI_TARGET.window, CPU)
    with torch.no_grad():
        ours = mtp_drafts(target, assistant, batch, 3, F32)[0]
    served = load_model(open_checkpoint(str(work / "embedded/target")), dtype=F32, device=CPU)
    spec = open_drafter(DraftChoice("mtp", str(work / "embedded/assistant")), served.spec)
    places = (3, MINI_TARGET.window - 1, MINI_TARGET.window, 29)
    rig = DraftRig.__new__(DraftRig)
    rig.harness = Harness(served, page_tokens=4, lookback=spec.lookback)
    layout = rig.harness.layout
    readers = [group for group in layout.groups if group.name in spec.readers(layout)]
    rig.drafter = spec.build(served, {group.index: TorchCPUBackend(group, spec.num_heads) for group in readers})
    theirs, _ = rig.drafts([TEXT[: place + 1] for place in places], [TEXT[place + 1] for place in places], 3)
    for place, drafts in zip(places, theirs, strict=True):
        expected = ours[place].tolist()
        fed = TEXT[place + 2 : place + 4]  # training feeds the text, Culet its own drafts; they are the same while they agree
        agreed = next((index for index in range(2) if drafts[index] != fed[index]), 2)
        assert drafts[: agreed + 1] == expected[: agreed + 1]


@torch.no_grad()
def test_dflash_drafts_are_those_of_the_published_form(work: Path, target: Target) -> None:
    drafter = DFlash(MINI_DFLASH, MINI_TARGET)
    read_weights(drafter, work / "embedded/dflash")
    batch = as_batch([Output(TEXT, [])], 4 * MINI_TARGET.window, CPU)
    ours = dflash_drafts(target, drafter, batch, F32)[0]
    taps = target(batch.ids_BT, batch.first_BT, F32, MINI_DFLASH.taps).taps
    oracle = DFlashOracle(work / "embedded/dflash", target.embedding, target.embedding_scale)
    for place in (0, 5, 20, len(TEXT) - 2):
        context = {tap: stream[0, : place + 1] for tap, stream in taps.items()}
        assert oracle.logits(context, TEXT[place + 1])[1:].argmax(-1).tolist() == ours[place].tolist()


def test_checkpoints_open_in_culet(work: Path) -> None:
    served = open_checkpoint(str(work / "embedded/target")).spec
    for method, name in (("mtp", "assistant"), ("dflash", "dflash")):
        assert open_drafter(DraftChoice(method, str(work / "embedded" / name)), served).max_drafts >= 3


def _training(pack: Path, folder: Path, steps: int) -> Training:
    torch.manual_seed(3)
    target = Target(MINI_TARGET)
    settings = Settings("t", steps=steps, row_len=128, rows_per_batch=2, rows_per_chunk=6, warmup_steps=5, log_every=4)
    phases = [Mixture({"plain": 1, "chat": 1}), Mixture({"chat": 1}, learn_all=False)]
    optimiser = Optimiser(target)
    log = Log(folder / "log.jsonl")
    source_of = text_source(load_parts(pack / "train"), phases, settings, CPU)
    return Training(target, optimiser, target_loss(target, F32), settings, source_of=source_of, folder=folder, log=log)


def test_resumes_where_it_stopped(pack: Path, tmp_path: Path) -> None:
    """A stop in the middle of a chunk does not change the weights."""
    whole = _training(pack, tmp_path / "whole", 12)
    whole.run()
    begun = _training(pack, tmp_path / "parts", 12)
    begun.stop_at = 7
    begun.run()
    assert begun.step == 7
    rest = _training(pack, tmp_path / "parts", 12)
    assert rest.step == 7
    rest.run()
    for expected, got in zip(whole.module.parameters(), rest.module.parameters(), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-4)


def test_rows_are_whole_documents(pack: Path) -> None:
    parts = load_parts(pack / "train")
    documents = {
        tuple(part.tokens[begin:end].tolist())
        for part in parts.values()
        for begin, end in zip(part.starts, part.ends, strict=True)
    }
    rows = Packer(parts, 128, 40).chunk({"plain": 1, "chat": 3}, learn_all=False)
    assert rows is not None
    chat_tokens = tokens = 0
    for ids, first in zip(rows.ids.tolist(), rows.first.tolist(), strict=True):
        for begin in sorted(set(first)):
            document = tuple(token for token, start in zip(ids, first, strict=True) if start == begin)
            if document != (0,):
                assert document in documents
                tokens += len(document)
                chat_tokens += len(document) * (document[1] == 105)
    assert chat_tokens / tokens == pytest.approx(0.75, abs=0.03)
    learnt = rows.learnt[rows.ids == 105]
    assert not learnt.any()


def test_joined_rows_see_what_came_before(pack: Path) -> None:
    rows = Packer(load_parts(pack / "train"), 128, 40, joined=1.0).chunk({"plain": 1}, learn_all=True)
    assert rows is not None
    assert not rows.first[rows.ids != 0].any()
    assert not rows.learnt[rows.ids == 2].any(), "where the next document begins cannot be known"
    assert rows.learnt[(rows.ids != 0) & (rows.ids != 2)].all()


def test_a_long_document_is_cut_into_rows(pack: Path) -> None:
    parts = load_parts(pack / "train")
    rows = Packer(parts, 16, 60).chunk({"plain": 1}, learn_all=True)
    assert rows is not None
    assert (rows.ids != 0).mean() > 0.6


def test_small_parts_are_not_shown_too_often() -> None:
    weights = {"a": 0.5, "b": 0.3, "c": 0.2, "none": 0.0}
    plenty = dict.fromkeys(weights, 1e9)
    assert capped(weights, plenty, 100.0) == pytest.approx({"a": 50.0, "b": 30.0, "c": 20.0, "none": 0.0})
    assert capped(weights, plenty | {"a": 20.0}, 100.0) == pytest.approx({"a": 20.0, "b": 48.0, "c": 32.0, "none": 0.0})
    assert capped(weights, {"a": 1.0, "b": 2.0, "c": 3.0, "none": 9.0}, 100.0) == {"a": 1.0, "b": 2.0, "c": 3.0, "none": 0.0}


def test_acceptance_is_counted_in_rounds() -> None:
    output = Output([1, 2], [10, 11, 12, 13, 14, 15])
    drafts = torch.full((8, 3), -1)
    drafts[1] = torch.tensor([11, 12, 99])  # after 10: two are right, then the target's own 13
    drafts[4] = torch.tensor([14, 15, 16])  # after 13: two are right, then the output ends
    result = count([output], [drafts], 3)
    assert result.tokens_per_verify == pytest.approx((3 + 2) / 2)
    assert result.by_draft == (1.0, 1.0, 0.0)


def test_repetitive_outputs_are_left_out() -> None:
    again = Output([1], list(range(10, 18)) * 3)
    assert again.is_repetitive
    assert not Output([1], list(range(10, 18)) * 2).is_repetitive
    result = count([again], [torch.zeros(30, 3)], 3)
    assert (result.num_outputs, result.num_repetitive) == (1, 1)


def test_orthogonalised() -> None:
    torch.manual_seed(0)
    for shape in ((4, 24, 16), (4, 16, 24)):
        values = torch.linalg.svdvals(orthogonalised(torch.randn(*shape)).float())
        assert float(values.min()) > 0.5
        assert float(values.max()) < 1.4


def test_top_p_draws() -> None:
    from training.models.generate import draw

    logits = torch.log(torch.tensor([[0.6, 0.3, 0.08, 0.02]])).repeat(2000, 1)
    drawn = draw(logits, Sampling(1.0, top_k=4, top_p=0.85), torch.Generator().manual_seed(0))
    share = np.bincount(drawn.numpy(), minlength=4) / 2000
    assert share[2] == share[3] == 0
    assert share[0] == pytest.approx(2 / 3, abs=0.04)
