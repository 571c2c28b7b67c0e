"""AsyncLLM, the offline interface for asyncio. Its engine runs in a thread, and requests of all tasks run together."""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, Self

from culet.config import BUILT_IN, Config
from culet.engine.engine import Engine
from culet.engine.jobs import Job, JobLoop, Result, Sample, check_params, offline_config
from culet.engine.prompts import Prompt, PromptReader
from culet.errors import BadRequest, ConfigError, CuletError, as_culet_error
from culet.text.chat_tokenizer import ChatTokenizer
from culet.text.output import OutputDelta, plain_output
from culet.types import SamplingParams


@dataclass(eq=False)
class _Waiter:
    """A task that waits for the output of its job."""

    job: Job
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    has_news: asyncio.Event = field(default_factory=asyncio.Event)  # set on `loop`
    error: CuletError | None = None  # why the job cannot go on


class AsyncEngineArgs:
    """The arguments of an AsyncLLM, for `AsyncLLM.from_engine_args`."""

    def __init__(self, model: str = BUILT_IN, **settings: Any) -> None:
        self.model, self.settings = model, settings


class AsyncLLM:
    """A Gemma 4 model for asyncio. It mirrors vLLM's class of the same name.

        llm = AsyncLLM("google/gemma-4-E2B-it")
        async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=32), "request-1"):
            print(output.outputs[0].text)
        llm.shutdown()

    Keywords are those of `LLM`. Tasks of several event loops may use it.
    """

    def __init__(self, model: str = BUILT_IN, *, trust_remote_code: bool = False, **settings: Any) -> None:
        self._start(offline_config(model, settings, trust_remote_code=trust_remote_code))

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """Create an AsyncLLM from a Config."""
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs) -> Self:
        """Create an AsyncLLM from engine arguments. vLLM has a method of the same name."""
        return cls(engine_args.model, **engine_args.settings)

    def _start(self, config: Config) -> None:
        engine = Engine(config)
        self._prompts = PromptReader(engine.tokenizer, engine.chat_template, engine.media)
        self._tokenizer, self._chat_tokenizer = engine.tokenizer, ChatTokenizer(engine.tokenizer, engine.chat_template)
        self._thread = _EngineThread(JobLoop(engine))
        self._waiters: dict[str, _Waiter] = {}  # by the caller's request id
        self._numbers = itertools.count()
        # Also stops the thread if nobody calls shutdown, at the latest when the interpreter exits.
        self._stop = weakref.finalize(self, self._thread.stop)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[Result]:
        """Continue a prompt, which is a text, a list of token ids, or a mapping with media as for `LLM.generate`.

        Each result holds the whole output so far, and the last one has `finished` set. Pass `request_id` to `abort` to end the
        request early. Cancelling the task or leaving the loop also ends it. Requests with a lower `priority` run first.
        """
        params = SamplingParams() if sampling_params is None else check_params(sampling_params)
        request_id = f"request-{next(self._numbers)}" if request_id is None else request_id
        job = await asyncio.to_thread(self._make_job, prompt, params, priority)
        if request_id in self._waiters:
            raise BadRequest(f"request_id: got {request_id!r}, which is already running", hint="use another id")
        waiter = self._waiters[request_id] = _Waiter(job)
        try:
            self._thread.send(partial(self._thread.add, waiter))
            async for result in _results(waiter):
                yield replace(result, request_id=request_id)
        finally:
            del self._waiters[request_id]
            with suppress(ConfigError):  # it was shut down, which ended the request
                self._thread.send(partial(self._thread.drop, waiter))

    def _make_job(self, prompt: Prompt, params: SamplingParams, priority: int) -> Job:
        prompts = self._prompts.read(prompt)
        if len(prompts) != 1:
            raise BadRequest(f"prompt: got {len(prompts)} prompts, expected one", hint="call generate once per prompt")
        request = self._thread.jobs.make_request(prompts[0].token_ids, params, prompts[0].media, prompts[0].items, priority)
        job = Job(request, params, partial(plain_output, self._tokenizer), prompts[0].text)
        job.unread = deque()
        return job

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End a request, or several. Their last results have the finish reason `abort`. Unknown ids are ignored."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            if (waiter := self._waiters.get(name)) is not None:
                self._thread.send(partial(self._thread.jobs.cancel, waiter.job))

    async def get_tokenizer(self) -> ChatTokenizer:
        """Return the tokenizer. It has the most common methods of transformers' tokenizers."""
        return self._chat_tokenizer

    def shutdown(self) -> None:
        """Free the model and its memory. Requests that are running end with an error."""
        self._stop()
        self._prompts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shutdown()


async def _results(waiter: _Waiter) -> AsyncIterator[Result]:
    """Yield everything so far whenever the job has new output. Output that arrives in between is in the next result."""
    job = waiter.job
    parts = [_Part() for _ in job.samples]
    assert job.unread is not None
    while True:
        await waiter.has_news.wait()
        waiter.has_news.clear()
        while job.unread:
            delta = job.unread.popleft()
            parts[delta.sample].read(delta)
        if job.num_running == 0:
            yield job.result()
            return
        if waiter.error is not None:
            raise waiter.error
        request, has_logprobs = job.request, job.request.sampling.logprobs is not None
        samples = tuple(part.sample(index, has_logprobs) for index, part in enumerate(parts))
        yield Result(request.prompt_token_ids, samples, job.num_cached_tokens, job.prompt, finished=False)


class _Part:
    """What a sample has produced so far. Kept apart from the job, which the engine's thread changes."""

    def __init__(self) -> None:
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: list[Any] = []

    def read(self, delta: OutputDelta) -> None:
        self._text += delta.text
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs

    def sample(self, index: int, has_logprobs: bool) -> Sample:
        logprobs = tuple(self._logprobs) if has_logprobs else None
        return Sample(self._text, tuple(self._token_ids), logprobs, "", index=index)


class _EngineThread:
    """Runs the steps of a JobLoop in a thread, and wakes the tasks whose jobs have new output.

    Only this thread uses the engine. Tasks send it work, which it does between two steps, so an event loop never waits for one.
    """

    def __init__(self, jobs: JobLoop) -> None:
        self.jobs = jobs
        self._commands: deque[Callable[[], None]] = deque()
        self._has_command = threading.Event()
        self._waiting: deque[_Waiter] = deque()  # jobs that the engine's queue has no room for
        self._running: set[_Waiter] = set()
        self._is_stopped = False
        self._lock = threading.Lock()  # no command is accepted after the stop
        self._thread = threading.Thread(target=self._run, name="culet-engine", daemon=True)
        self._thread.start()

    def send(self, command: Callable[[], None]) -> None:
        """Have the thread call `command` before its next step."""
        with self._lock:
            if self._is_stopped:
                raise _closed()
            self._commands.append(command)
        self._has_command.set()

    def stop(self) -> None:
        """End the thread, which frees the engine."""
        with self._lock:
            self._is_stopped = True
        self._has_command.set()
        if threading.current_thread() is not self._thread:  # the garbage collector may call from anywhere
            self._thread.join()

    # Commands, called by this thread

    def add(self, waiter: _Waiter) -> None:
        self._waiting.append(waiter)

    def drop(self, waiter: _Waiter) -> None:
        self._running.discard(waiter)
        if waiter in self._waiting:
            self._waiting.remove(waiter)
        self.jobs.drop(waiter.job)

    # The loop

    def _run(self) -> None:
        while not self._is_stopped:
            self._obey()
            self._begin_waiting()
            if not self._running:
                self._has_command.wait()
                self._has_command.clear()
                continue
            try:
                self.jobs.step()
            except Exception as error:
                self._fail(as_culet_error(error))
            else:
                self._deliver()
        self._obey()
        self._fail(_closed())
        self.jobs.close()

    def _begin_waiting(self) -> None:
        """Queue jobs in the engine, in order, as long as it has room."""
        while self._waiting:
            waiter = self._waiting[0]
            try:
                if not self.jobs.try_add(waiter.job):
                    return
            except CuletError as error:
                waiter.error = error
                _wake([waiter])
            else:
                self._running.add(waiter)
            self._waiting.popleft()

    def _obey(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _deliver(self) -> None:
        news = [waiter for waiter in self._running if waiter.job.unread]
        self._running.difference_update([waiter for waiter in news if waiter.job.num_running == 0])
        _wake(news)

    def _fail(self, error: CuletError) -> None:
        ended = [*self._running, *self._waiting]
        self._running.clear()
        self._waiting.clear()
        for waiter in ended:
            waiter.error = error
        _wake(ended)


def _closed() -> ConfigError:
    return ConfigError("this AsyncLLM was shut down", hint="create a new one")


def _wake(waiters: Iterable[_Waiter]) -> None:
    """Wake tasks, with one call for each of their event loops."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Waiter]] = {}
    for waiter in waiters:
        by_loop.setdefault(waiter.loop, []).append(waiter)
    for loop, woken in by_loop.items():
        if not loop.is_closed():
            loop.call_soon_threadsafe(_set_all, [waiter.has_news for waiter in woken])


def _set_all(events: Iterable[asyncio.Event]) -> None:
    for event in events:
        event.set()
