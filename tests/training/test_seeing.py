"""Teaching the model to see, at toy size: it learns, it resumes, and Culet's towers and engine read what it exports."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import culet
from culet import LLM, SamplingParams
from culet.media.items import MediaItem, MediaKind
from culet.media.spec import read_media_spec
from culet.models.checkpoint import open_checkpoint
from culet.models.towers import load_towers
from tests.training.training_pack import write_pack
from training.data.pictures.chats import draw_batch
from training.learning.batches import Batch
from training.learning.loop import Log, Settings, Training
from training.learning.optimiser import Optimiser, Optimisers
from training.learning.pictures import Drawing, SeeBatch, picture_source
from training.learning.see_losses import see_loss, text_loss
from training.models.drafters import Assistant, DFlash
from training.models.export import copy_tokenizer, read_weights, write_checkpoint
from training.models.model import Target
from training.models.shapes import (
    MINI_ASSISTANT,
    MINI_DFLASH,
    MINI_TARGET,
    MINI_TOWER,
    TargetShape,
    TowerShape,
    processor_config,
)
from training.models.tower import Seer, Tower, row_scale
from training.picture_gate import answer, ask_about_pictures, read_questions, sees
from training.see import main

F32 = torch.float32
CPU = torch.device("cpu")
EMBEDDED = Path(culet.__file__).parent / "embedded"
TOKENIZER = EMBEDDED / "target/tokenizer.json"
MINI = replace(MINI_TARGET, vocab_size=TargetShape().vocab_size)
DRAWING = Drawing(TOKENIZER, num_pictures=2, num_rows=2, row_len=256)


def see_batch(seed: str = "0") -> SeeBatch:
    drawn = draw_batch(TOKENIZER, seed, 4, 4, 256)
    arrays = (drawn.pictures, drawn.labels, drawn.soft, drawn.ids, drawn.first, drawn.learnt)
    pictures, labels, soft, *rows = (torch.from_numpy(array) for array in arrays)
    return SeeBatch(pictures, labels, soft, Batch(*rows))


def mini_seer() -> Seer:
    torch.manual_seed(2)
    target = Target(MINI)
    return Seer(target, Tower(MINI_TOWER, row_scale(target)))


def scrambled(tower: Tower) -> Tower:
    """Give every gain and position a value that hides no mistake."""
    with torch.no_grad():
        for parameter in tower.parameters():
            if parameter.dim() != 2:
                parameter.copy_(torch.rand_like(parameter) + 0.5)
    return tower


def test_four_pictures_are_learnt_by_heart() -> None:
    seer, batch = mini_seer(), see_batch()
    optimiser = Optimisers(Optimiser(seer.tower), Optimiser(seer.target))
    loss_of = see_loss(seer, F32)
    losses = []
    for _ in range(12):
        total, weight = loss_of(batch)
        (total / weight).backward()
        optimiser.step(1.0)
        losses.append(float((total / weight).detach()))
    assert losses[-1] < 0.7 * losses[0]


def test_only_the_tower_learns_if_the_decoder_is_frozen() -> None:
    seer, batch = mini_seer(), see_batch()
    seer.target.requires_grad_(False)
    before = [parameter.clone() for parameter in seer.target.parameters()]
    optimiser = Optimisers(Optimiser(seer.tower))
    changed = {name: parameter.clone() for name, parameter in seer.tower.named_parameters()}
    total, weight = see_loss(seer, F32)(batch)
    (total / weight).backward()
    optimiser.step(1.0)
    assert all(torch.equal(old, new) for old, new in zip(before, seer.target.parameters(), strict=True))
    assert not any(torch.equal(changed[name], parameter) for name, parameter in seer.tower.named_parameters())


def test_the_picture_matters() -> None:
    """Soft tokens see the features, and not the embeddings of their ids."""
    seer, batch = mini_seer(), see_batch()
    loss_of = see_loss(seer, F32)
    other = replace(batch, pictures_PCHW=255 - batch.pictures_PCHW)
    assert float(loss_of(batch)[0].detach()) != float(loss_of(other)[0].detach())
    features = seer.tower(batch.pictures_PCHW, F32)
    rows, is_soft = seer.rows(batch.rows.ids_BT, batch.soft_BT, features, F32), batch.soft_BT >= 0
    assert torch.equal(rows[is_soft], features.flatten(0, 1)[batch.soft_BT[is_soft]])
    assert torch.equal(rows[~is_soft], seer.target.embed(batch.rows.ids_BT, F32)[~is_soft])


def test_text_is_compared_with_the_former_self() -> None:
    seer = mini_seer()
    rows = see_batch().rows
    same, weight = text_loss(seer.target, seer.target, rows, F32)
    assert float(same.detach()) == pytest.approx(0, abs=1e-3)
    assert float(weight) == int((rows.ids_BT != 0).sum())
    changed, _ = text_loss(seer.target, mini_seer_with_noise().target, rows, F32)
    assert float(changed.detach()) > 1


def mini_seer_with_noise() -> Seer:
    seer = mini_seer()
    with torch.no_grad():
        for block in seer.target.blocks:
            block.gate.normal_()
    return seer


def _training(folder: Path) -> Training:
    seer = mini_seer()
    seer.target.requires_grad_(False)
    settings = Settings("t", steps=4, warmup_steps=1)
    source_of = picture_source(DRAWING, CPU)
    log = Log(folder / "log.jsonl")
    optimiser = Optimisers(Optimiser(seer.tower))
    return Training(seer, optimiser, see_loss(seer, F32), settings, source_of=source_of, folder=folder, log=log)


def test_resumes_where_it_stopped(tmp_path: Path) -> None:
    whole = _training(tmp_path / "whole")
    whole.run()
    begun = _training(tmp_path / "parts")
    begun.stop_at = 2
    begun.run()
    rest = _training(tmp_path / "parts")
    assert rest.step == 2
    rest.run()
    for expected, got in zip(whole.module.parameters(), rest.module.parameters(), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-4)


def write_seeing(folder: Path, seer: Seer, tower: TowerShape, **options: torch.dtype) -> Path:
    copy_tokenizer(EMBEDDED / "target", folder)
    (folder / "processor_config.json").write_text(json.dumps(processor_config(70)))
    write_checkpoint(folder, seer.target.shape.config(tower), seer, **options)
    return folder


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Seer, Path]:
    """The built-in decoder with an untrained tower of the real shape, in float32."""
    torch.manual_seed(4)
    target = Target(TargetShape())
    read_weights(target, EMBEDDED / "target")
    seer = Seer(target, scrambled(Tower(TowerShape(), row_scale(target))))
    return seer, write_seeing(tmp_path_factory.mktemp("seeing") / "target", seer, TowerShape(), dtype=F32)


@torch.no_grad()
def test_culets_tower_gives_the_same_features(real: tuple[Seer, Path]) -> None:
    seer, folder = real
    towers = load_towers(open_checkpoint(str(folder)), dtype=F32, device=CPU, progress=False)
    assert towers is not None
    random = np.random.default_rng(0)
    for height, width in ((384, 384), (288, 528)):
        pixels = random.integers(0, 256, (height, width, 3), np.uint8)
        item = MediaItem(MediaKind.IMAGE, b"x", height * width // 48**2, pixels.shape, pixels.tobytes())
        ours = seer.tower(torch.from_numpy(pixels).permute(2, 0, 1)[None].contiguous(), F32)[0]
        [theirs] = towers.encode([item])
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_an_export_reads_back(real: tuple[Seer, Path]) -> None:
    seer, folder = real
    again = Seer(Target(TargetShape()), Tower(TowerShape(), 0.5))
    read_weights(again, folder)
    picture = see_batch().pictures_PCHW[:1]
    with torch.no_grad():
        torch.testing.assert_close(again.tower(picture, F32), seer.tower(picture, F32), atol=1e-5, rtol=1e-5)


def test_the_tower_is_small_enough() -> None:
    num_weights = sum(parameter.numel() for parameter in Tower(TowerShape()).parameters())
    assert 2e6 < num_weights < 3.5e6
    stored = sum(path.stat().st_size for path in EMBEDDED.glob("*/model.safetensors"))
    assert stored + 2 * num_weights < 45e6


def test_pictures_take_few_tokens_by_default(real: tuple[Seer, Path]) -> None:
    spec = read_media_spec(json.loads((real[1] / "config.json").read_text()), real[1])
    assert spec.image_budget == 70
    assert spec.tokens.image == 112
    assert spec.tokens.marks(MediaKind.IMAGE) == (110, 111)
    assert not spec.is_whole
    assert sees(real[1])


@pytest.mark.slow
def test_text_stays_the_same_and_pictures_are_answered(real: tuple[Seer, Path]) -> None:
    """With an untrained tower, text is bit-equal, and the engine answers about pictures as training does."""
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=1)
    with LLM(device="cpu", dtype="float32") as plain:
        [wanted] = plain.chat(messages, params, use_tqdm=False)
    with LLM(str(real[1]), device="cpu", dtype="float32") as llm:
        [got] = llm.chat(messages, params, use_tqdm=False)
        assert (got.token_ids, got.logprobs) == (wanted.token_ids, wanted.logprobs)
        lines = read_questions()[:2]
        answers = answer(llm, real[1], lines)
        shares, wrong = ask_about_pictures(llm, real[1], every=100)
    assert all(isinstance(text, str) for text in answers)
    assert 0 <= shares["pictures"] <= 1
    assert len(wrong) == round(2 * (1 - shares["pictures"]))


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Untrained mini checkpoints, and a pack of text for them."""
    pack = write_pack(tmp_path_factory.mktemp("pack"))
    folder = tmp_path_factory.mktemp("start")
    torch.manual_seed(0)
    write_checkpoint(folder / "target", MINI_TARGET.config(), Target(MINI_TARGET))
    write_checkpoint(folder / "assistant", MINI_ASSISTANT.config(MINI_TARGET), Assistant(MINI_ASSISTANT, MINI_TARGET))
    write_checkpoint(folder / "dflash", MINI_DFLASH.config(MINI_TARGET), DFlash(MINI_DFLASH, MINI_TARGET))
    copy_tokenizer(pack / "tokenizer", folder / "target")
    return folder, pack


@pytest.mark.parametrize("decoder", ["frozen", pytest.param("tuned", marks=pytest.mark.slow)])
def test_one_command_does_it_all(start: tuple[Path, Path], decoder: str, tmp_path: Path) -> None:
    folder, pack = start
    options = ["--start-from", str(folder), "--work", str(tmp_path), "--pack", str(pack), "--mini", "--device", "cpu"]
    options += ["--steps", "4", "--pictures", "2", "--workers", "0", "--checked", "2", "--decoder", decoder]
    options += ["--drafter-steps", "1,2,2", "--own-prompts", "8"]
    assert main(options) == 0
    entries = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [entry["stage"] for entry in entries if entry.get("event") == "done"] == (
        ["tower"] if decoder == "frozen" else ["tower", "see"]
    )
    assert any(entry.get("event") == "checked" for entry in entries)
    read = open_checkpoint(str(tmp_path / "embedded/target"))
    assert read.spec.has_towers
    same = Target(MINI_TARGET), Target(MINI_TARGET)
    read_weights(same[0], folder / "target")
    read_weights(same[1], tmp_path / "embedded/target")
    is_equal = all(torch.equal(a, b) for a, b in zip(same[0].parameters(), same[1].parameters(), strict=True))
    assert is_equal == (decoder == "frozen")
    for name in ("assistant", "dflash"):
        assert (tmp_path / "embedded" / name / "model.safetensors").exists()
