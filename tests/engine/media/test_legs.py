"""Chunks with images that run in several steps, some of the layers in each: the same answers as in one step."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch

from benchmarks.images_beside_decode import image_request
from culet.bench.workloads import make_tokens
from culet.cache.pool import Pool
from culet.config import build_config
from culet.engine.engine import Engine
from culet.errors import InternalError
from culet.runner.checks import check_step
from culet.runner.fixed.prompts import PaddedPieces, _Buffers
from culet.runner.worker import RunStep, command_decoder
from culet.scheduler import sequence
from culet.types import FinishReason, Leg, PageTable, Request, Row, SamplingParams, StepPlan
from tests.engine.media.media_rig import VOCAB, Prompt, Told, ask, check_answer, image, make, note, table, text
from tests.engine.scheduler.drive import make_layout

SHAPES = ("12B", "26B-A4B", "31B")
LEG_TOKENS = 4  # chunks with images have 12 or more tokens, and so three or more legs
CAT, DOG = image(2, 5, 1), image(2, 4, 2)  # 10 and 8 tokens


def seen(shape: str, seed: int, *, before: int = 2, after: int = 2) -> Prompt:
    return Prompt.of(shape, text(before, seed), CAT if seed % 2 else DOG, text(after, seed + 1))


class Rig:
    """An engine with chunks in legs, and the legs that its runner gets."""

    def __init__(self, shape: str, *, leg_tokens: int = LEG_TOKENS, **settings: Any) -> None:
        self.engine = make(shape, max_step_ms=0, **settings)  # chunks that do not depend on the machine's speed
        self.engine._scheduler._legs.leg_tokens = leg_tokens
        self.shape, self.legs = shape, list[Leg]()
        self.told: dict[str, Told] = {}
        self.num_encoded = 0
        runner: Any = self.engine._worker
        launch = runner.launch

        def spy(plan: StepPlan) -> Any:
            self.legs += [row.leg for row in plan.rows if not row.leg.is_whole]
            return launch(plan)

        runner.launch = spy

    def add(self, name: str, prompt: Prompt, num_tokens: int = 4, **settings: Any) -> None:
        settings = {"logprobs": VOCAB} | settings
        self.told[name] = Told({}, {}, [], {})
        self.engine.add(ask(self.engine, name, prompt, num_tokens, **settings))

    def start_chats(self, count: int = 2, num_tokens: int = 40) -> None:
        for number in range(count):
            self.add(f"chat {number}", Prompt.of(self.shape, text(5 + number, number)), num_tokens)
        while not all(told.tokens for told in self.told.values()):
            self.step()

    def step(self) -> None:
        for delta in self.engine.step():
            note(self.told[delta.request_id], delta)

    def step_until(self, condition: Callable[[], Any]) -> None:
        for _ in range(100):
            if condition():
                return
            self.step()
        raise AssertionError("it does not happen")

    def finish(self) -> dict[str, Told]:
        """Run to the end, and check that nothing is left behind."""
        while self.engine.has_work:
            self.step()
        arena = self.engine._scheduler.page_allocator.arena
        assert arena.num_free + arena.num_reclaimable == arena.num_pages
        self.engine._scheduler.drop_resume_points()
        assert arena.num_free == arena.num_pages
        assert self.engine._worker.legs._kept is None or self.num_begun > self.num_ended  # type: ignore[attr-defined]
        return self.told

    @property
    def num_begun(self) -> int:
        return sum(leg.is_first for leg in self.legs)

    @property
    def num_ended(self) -> int:
        return sum(leg.is_last for leg in self.legs)

    @property
    def sequence(self) -> Any:
        """The sequence that is between its legs, if any."""
        return next((seq for seq in self.engine._scheduler._running if seq.num_underway), None)


def assert_same(got: dict[str, Told], want: dict[str, Told]) -> None:
    """Compare tokens, and log-probabilities of all tokens."""
    assert got.keys() == want.keys()
    for name, told in got.items():
        other = want[name]
        assert told.tokens == other.tokens, name
        for sample, logprobs in told.logprobs.items():
            torch.testing.assert_close(table(logprobs), table(other.logprobs[sample]), rtol=0, atol=1e-4)


Scenario = Callable[[Rig], None]


def in_a_row(rig: Rig) -> None:
    for number in range(4):
        rig.add(f"seen {number}", seen(rig.shape, number))
        for _ in range(5):
            rig.step()


def at_once(rig: Rig) -> None:
    for number in range(3):
        rig.add(f"seen {number}", seen(rig.shape, number))


def samples(rig: Rig) -> None:
    rig.add("seen", seen(rig.shape, 1), 5, n=2, temperature=2.0, top_k=0, top_p=1.0, seed=3)


def chunks(rig: Rig, **settings: Any) -> None:
    """A text that fills a step, then a chunk in the middle with an image, then one that draws."""
    parts = text(25, 5), CAT, text(9, 6), DOG, text(4, 7)
    rig.add("seen", Prompt.of(rig.shape, *parts), **settings)


def penalties(rig: Rig) -> None:
    rig.add("seen", seen(rig.shape, 1), 8, repetition_penalty=1.3, presence_penalty=0.5, logit_bias={9: 2.0})


def long(rig: Rig) -> None:
    """Chunks that are longer than the window store only the last of their tokens, at the start of a prompt and after others."""
    rig.add("seen", Prompt.of(rig.shape, text(2, 1), image(4, 5, 3), text(2, 2)))
    for _ in range(10):
        rig.step()
    rig.add("after text", Prompt.of(rig.shape, text(35, 5), image(4, 6, 4), text(3, 6)))


def urgent(rig: Rig) -> None:
    """Once it runs, its row comes before those of the chats."""
    chunks(rig, priority=-1)


SCENARIOS: dict[str, tuple[Scenario, dict[str, Any]]] = {
    "in a row": (in_a_row, {}),
    "at once": (at_once, {"max_num_batched_tokens": 8 + 15}),
    "samples": (samples, {}),
    "chunks": (chunks, {"max_num_batched_tokens": 2 + 16, "max_num_seqs": 3}),
    "penalties": (penalties, {}),
    "long": (long, {"max_num_batched_tokens": 2 + 35, "max_num_seqs": 3}),
    "urgent": (urgent, {"max_num_batched_tokens": 2 + 16, "max_num_seqs": 3}),
}


def play(scenario: str, shape: str, *, leg_tokens: int = LEG_TOKENS, **settings: Any) -> Rig:
    act, own = SCENARIOS[scenario]
    rig = Rig(shape, leg_tokens=leg_tokens, **own, **settings)
    rig.start_chats()
    act(rig)
    rig.finish()
    return rig


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_legs_change_nothing(scenario: str, shape: str) -> None:
    whole = play(scenario, shape, leg_tokens=0)
    assert not whole.legs
    for leg_tokens in (LEG_TOKENS, 2, 8):
        cut = play(scenario, shape, leg_tokens=leg_tokens)
        assert cut.num_begun == cut.num_ended >= 1
        assert cut.engine.stats().counters.chunks_in_legs == cut.num_begun
        assert_same(cut.told, whole.told)


def test_look_ahead_changes_nothing() -> None:
    """A leg is planned and launched before the result of the one before is known."""
    rig = play("in a row", "31B", async_scheduling=True)
    assert rig.num_begun == rig.num_ended == 4
    assert_same(rig.told, play("in a row", "31B", leg_tokens=0).told)


@pytest.mark.parametrize("shape", SHAPES)
def test_answers_are_those_of_transformers(shape: str) -> None:
    rig = Rig(shape)
    rig.start_chats()
    rig.add("seen", prompt := seen(shape, 1), 5)
    rig.finish()
    assert rig.num_begun == rig.num_ended == 1
    check_answer(shape, prompt, rig.told["seen"])


@pytest.mark.parametrize("shape", ["12B", "31B"])
def test_the_next_turn_reuses_a_chunk_in_legs(shape: str) -> None:
    rig = Rig(shape)
    rig.start_chats()
    rig.add("first", prompt := seen(shape, 1), 3)
    rig.step_until(lambda: rig.told["first"].reasons)
    second = prompt.then(*rig.told["first"].tokens[0], *text(6, 2))
    rig.add("second", second, 4)
    rig.finish()
    assert rig.num_begun == 1
    assert rig.told["second"].num_cached == len(prompt.token_ids) + 2
    check_answer(shape, second, rig.told["second"])


@pytest.mark.parametrize("has_look_ahead", [False, True])
@pytest.mark.parametrize("what", ["preempt", "preempt all", "park all", "cancel", "cancel chats"])
def test_between_the_legs(what: str, has_look_ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With look-ahead, the step with the first leg may not have ended yet."""
    monkeypatch.setattr(sequence, "MIN_PARKED", 0)
    rig = Rig("31B", async_scheduling=has_look_ahead)
    rig.start_chats()
    rig.add("seen", prompt := seen("31B", 1), 5)
    if has_look_ahead:
        rig.engine._max_in_flight = 1  # so that the engine stops between the legs
    rig.step_until(lambda: rig.sequence)
    rig.engine._max_in_flight = 1 + has_look_ahead
    scheduler = rig.engine._scheduler
    if what == "preempt":
        scheduler._preempt(rig.sequence)
    elif what in ("preempt all", "park all"):
        for seq in list(scheduler._running):
            assert what != "park all" or seq.park(scheduler.page_allocator)
            scheduler._preempt(seq)
    else:
        for name in ["seen"] if what == "cancel" else ["chat 0", "chat 1"]:
            rig.engine.cancel(name)
    rig.add("other", other := seen("31B", 2), 4)  # may take the slot and the pages
    told = rig.finish()
    check_answer("31B", other, told["other"])
    if what == "cancel":
        assert told["seen"].reasons == {0: FinishReason.CANCEL}
        assert not told["seen"].tokens.get(0)
    else:
        check_answer("31B", prompt, told["seen"])
    for number in range(2) if what != "cancel chats" else ():
        check_answer("31B", Prompt.of("31B", text(5 + number, number)), told[f"chat {number}"])
    assert (rig.num_begun > rig.num_ended) == (what != "cancel chats")
    # Nothing of the chunk counts as computed before its last leg, so it is not restored.
    assert (scheduler.counters.parked, scheduler.counters.restored) == ((3, 2) if what == "park all" else (0, 0))


def test_a_step_that_fails_between_the_legs() -> None:
    """The step with the second leg fails. Its requests end, and the next request with an image is right."""
    rig = Rig("31B")
    rig.start_chats()
    rig.add("seen", seen("31B", 1), 5)
    rig.step_until(lambda: rig.sequence)
    runner: Any = rig.engine._worker
    run_legs = runner.legs.run

    def fail(*_: Any) -> None:
        raise InternalError("no luck")

    runner.legs.run = fail
    with pytest.raises(InternalError):
        rig.step()
    runner.legs.run = run_legs
    rig.step()
    assert set(rig.told["seen"].reasons.values()) == {FinishReason.ERROR}
    del rig.told["chat 0"], rig.told["chat 1"]
    rig.start_chats()
    rig.add("again", prompt := seen("31B", 1), 5)
    rig.finish()
    check_answer("31B", prompt, rig.told["again"])
    assert rig.num_begun == 2


def test_features_may_go_between_the_legs() -> None:
    """Only the first leg reads them."""
    rig = Rig("31B")
    rig.start_chats()
    rig.add("seen", prompt := seen("31B", 1), 5)
    rig.step_until(lambda: rig.sequence)
    store = rig.engine._worker.media.store  # type: ignore[attr-defined]
    store.change([CAT.key], [])
    features = rig.engine._scheduler.features
    assert features is not None
    features.num_bytes -= features._held.pop(CAT.key).num_bytes
    rig.finish()
    assert rig.num_begun == rig.num_ended == 1
    check_answer("31B", prompt, rig.told["seen"])


# In padded pieces, which a GPU replays as graphs


class FakeGraph:
    """Runs its piece again and writes the result to the place of the captured one, as a CUDA graph does."""

    def __init__(self, piece: Callable[[], Any], owner: FakeCaptures) -> None:
        self._piece, self._owner = piece, owner
        self.result = piece()

    def replay(self) -> None:
        self._owner.replays(self)
        overwrite(self.result, self._piece())


class FakeCaptures:
    """Captures of one size. When another size is replayed, its memory is overwritten."""

    def __init__(self, all_sizes: list[FakeCaptures]) -> None:
        self._all_sizes, self.graphs = all_sizes, list[FakeGraph]()
        all_sizes.append(self)

    def capture_warm(self, piece: Callable[[], Any]) -> tuple[FakeGraph, Any]:
        self.graphs.append(graph := FakeGraph(piece, self))
        return graph, graph.result

    def replays(self, graph: FakeGraph) -> None:
        if graph is self.graphs[0]:
            for other in self._all_sizes:
                for one in other.graphs if other is not self else ():
                    for tensor in tensors_in(one.result):
                        if tensor.is_floating_point():
                            tensor.fill_(torch.nan)


def overwrite(target: Any, source: Any) -> None:
    if isinstance(target, torch.Tensor):
        target.copy_(source)
    elif isinstance(target, tuple):
        for one, other in zip(target, source, strict=True):
            overwrite(one, other)
    elif isinstance(target, list):  # addresses and rope, whose shapes depend on what is stored on a CPU
        target[:] = source


def tensors_in(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    parts = result if isinstance(result, tuple | list) else vars(result).values() if hasattr(result, "__dict__") else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


def use_pieces(rig: Rig, sizes: Sequence[int], monkeypatch: pytest.MonkeyPatch, *, has_graphs: bool) -> list[Any]:
    """Run steps in padded pieces of these sizes. Return a list that gets the size of each span of layers."""
    monkeypatch.setattr("culet.runner.fixed.prompts.SIZES", sizes)
    runner: Any = rig.engine._worker
    pool = Pool(runner.pool.layout, runner.pool.num_slabs, torch.float32, torch.device("cpu"), has_spare=True)
    runner.pool = runner.target.pool = pool
    prompts = runner.use_fixed_shapes(max_prompt=512).prompts
    found: list[Any] = []
    smallest = prompts.smallest

    def spy(num_tokens: int) -> Any:
        pieces = smallest(num_tokens)
        found.append(pieces.size if isinstance(pieces, PaddedPieces) else pieces)
        return pieces

    prompts.smallest = spy
    if has_graphs:
        monkeypatch.setattr("culet.runner.fixed.prompts.borrowed", lambda result: result)
        captures: list[FakeCaptures] = []
        for pieces in prompts._pieces.values():
            with torch.inference_mode(), pieces.capturing(FakeCaptures(captures)):
                prompts._run_without_rows(pieces)
            assert pieces.num_captured == 3 + 2 * runner.target.model.num_whole_layers(())
    return found


def play_three(rig: Rig, num_steps: int = 4) -> dict[str, Told]:
    for number in range(3):
        rig.add(f"seen {number}", seen(rig.shape, number))
        for _ in range(num_steps):
            rig.step()
    return rig.finish()


@pytest.mark.parametrize("has_graphs", [False, True], ids=["pieces", "graphs"])
@pytest.mark.parametrize("shape", SHAPES)
def test_legs_in_pieces(shape: str, has_graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each span of layers runs in pieces of its own size. So do steps that only decode."""
    rig = Rig(shape, max_num_batched_tokens=512)
    sizes = use_pieces(rig, (8, 24, 64), monkeypatch, has_graphs=has_graphs)
    rig.start_chats()
    sizes.clear()
    told = play_three(rig)
    assert rig.legs == [Leg(index, index + 1, 4) for index in range(4)] * 3
    first, middle, last = [24, 8], [8, 24, 8], [8, 24]  # the spans of layers in each step
    assert sizes == [*first, *middle, *middle, *last] * 3
    assert_same(told, play_plain(shape))


@pytest.mark.parametrize("sizes", [(24,), (2, 16, 18)], ids=["one size", "no padding"])
def test_legs_of_one_layer_in_graphs(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """All spans of a step may use the same graphs, and each leg begins and ends at another layer."""
    monkeypatch.setattr("culet.scheduler.media.legs.MAX_LEGS", 6)
    rig = Rig("31B", leg_tokens=1, max_num_batched_tokens=512)
    assert len(rig.engine.spec.layers) == 6
    found = use_pieces(rig, sizes, monkeypatch, has_graphs=True)
    rig.start_chats()
    found.clear()
    told = play_three(rig, num_steps=10)
    assert rig.legs == [Leg(index, index + 1, 6) for index in range(6)] * 3
    assert set(found) == set(sizes)
    assert_same(told, play_plain("31B"))


@pytest.mark.parametrize("has_graphs", [False, True])
def test_skipped_pieces_leave_no_padding_behind(has_graphs: bool) -> None:
    """Padding may choose experts, so it must hold numbers."""
    pieces = PaddedPieces(8, _Buffers.allocate(8, 1, torch.device("cpu")), None)
    pieces._num_tokens = 3
    memory = torch.full((8, 4), torch.nan), torch.full((8, 4), torch.nan)
    if has_graphs:
        pieces._graphs = [(None, None), (None, memory), (None, None)]  # type: ignore[list-item]
    found = pieces.skip(2, (torch.ones(3, 4), torch.ones(3, 4)))
    for tensor_U, place in zip(found, memory, strict=True):
        assert (tensor_U is place) == has_graphs
        assert tensor_U.sum(1).tolist() == [4, 4, 4, 0, 0, 0, 0, 0]
    assert pieces._next == 2 * has_graphs


def play_plain(shape: str) -> dict[str, Told]:
    rig = Rig(shape, leg_tokens=0)
    rig.start_chats()
    return play_three(rig)


# Plans


def test_plans_with_legs_cross_to_a_worker() -> None:
    plan = StepPlan(3, (), (), (Row(0, 0, 4, 0, (PageTable(0, (1,)),), (0,), leg=Leg(1, 2, 3)),))
    received = command_decoder.decode(msgspec.msgpack.encode(RunStep(plan)))
    assert received == RunStep(plan)
    assert isinstance(received, RunStep)
    assert received.plan.rows[0].leg.layers(6) == (2, 4)


def test_wrong_legs_are_noticed() -> None:
    layout = make_layout((None, 8))
    good = Row(0, 0, 4, 0, (PageTable(0, (1,)),), (0,), leg=Leg(0, 1, 2))
    bounds = {"num_slots": 4, "room": 100, "num_slabs": 10}
    check_step(StepPlan(0, (), (), (good,)), layout, **bounds)
    wrong = (good, good._replace(slot=1, leg=Leg(1, 2, 2))), (good._replace(num_logits=1, draw_slots=(0,)),)
    for rows in (*wrong, *[(good._replace(leg=Leg(*layers)),) for layers in ((1, 1, 2), (0, 3, 2), (-1, 1, 2))]):
        with pytest.raises(InternalError, match="layer"):
            check_step(StepPlan(0, (), (), rows), layout, **bounds)


def test_a_leg_must_follow_the_one_before() -> None:
    rig = Rig("31B")
    rig.start_chats()
    rig.add("seen", seen("31B", 1))
    rig.step_until(lambda: rig.sequence)
    runner: Any = rig.engine._worker
    kept = runner.legs._kept
    runner.legs._kept = kept._replace(row=kept.row._replace(num_new=kept.row.num_new - 1))
    with pytest.raises(AssertionError, match="the leg before was"):
        rig.step()


# On a GPU

TOP = 20  # log-probabilities that are compared


def on_gpu(dtype: str) -> Engine:
    settings = {"model": "random:31B,layers=6,draw=calm", "dtype": dtype, "max_model_len": 1024, "max_num_seqs": 8}
    return Engine(build_config(settings | {"device": "cuda", "kv_cache_memory_bytes": 1 << 30}), progress=False)


def images_beside_chats(engine: Engine) -> list[Told]:
    """Return what three chats and two requests with images, one after another, were told."""
    engine._scheduler.drop_resume_points()
    vocab_size, without = engine.spec.vocab_size, engine.media.spec.tokens.all_ids
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, logprobs=TOP)  # until after the images
    told: dict[str, Told] = {}

    def add(request: Request) -> None:
        told[request.request_id] = Told({}, {}, [], {})
        engine.add(request)

    def step_until(name: str) -> None:
        while not told[name].tokens:
            for delta in engine.step():
                note(told[delta.request_id], delta)

    for number in range(3):
        chat = make_tokens(20 + number, vocab_size, random.Random(number), without=without)
        add(engine.rules.make_request(f"chat {number}", chat, params))
    step_until("chat 2")
    for number in range(2):
        request = image_request(engine, 280, str(number))
        add(dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, logprobs=TOP)))
        step_until(request.request_id)
    while engine.has_work:
        for delta in engine.step():
            note(told[delta.request_id], delta)
    return list(told.values())


def check_alike(got: Sequence[Told], want: Sequence[Told], *, is_exact: bool) -> None:
    """In float32, compare everything. In bfloat16, compare the likeliest tokens as long as both drew the same."""
    for told, other in zip(got, want, strict=True):
        if is_exact:
            assert told.tokens[0][:20] == other.tokens[0][:20]
        for mine, theirs in zip(told.logprobs[0], other.logprobs[0], strict=True):
            if is_exact:
                assert sorted(mine.values()) == pytest.approx(sorted(theirs.values()), abs=1e-3)
            else:  # of 262,144 tokens, nonsense has other ones
                assert len(mine.keys() & theirs.keys()) >= TOP // 2
            if next(iter(mine)) != next(iter(theirs)):
                break


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_legs_on_a_gpu(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Legs in graphs, legs without graphs and whole chunks give the same answers, and nothing is compiled for them."""
    engine = on_gpu(dtype)
    legs, counters = engine._scheduler._legs, engine._scheduler.counters
    legs.leg_tokens = 0
    whole = images_beside_chats(engine)
    assert counters.chunks_in_legs == 0
    legs.leg_tokens = 100  # three or four legs, of six layers
    in_graphs = images_beside_chats(engine)
    assert counters.chunks_in_legs == 2
    assert engine.stats().kernels_compiled == 0
    prompts = engine._worker.fixed.prompts  # type: ignore[attr-defined]
    assert prompts.num_captured > 0
    monkeypatch.setattr(prompts, "sizes", ())
    direct = images_beside_chats(engine)
    assert counters.chunks_in_legs == 4
    check_alike(in_graphs, direct, is_exact=dtype == "float32")
    check_alike(in_graphs, whole, is_exact=dtype == "float32")
    engine.close()
