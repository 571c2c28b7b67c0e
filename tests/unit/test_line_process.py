"""Programs that do not read, do not answer, were stopped or were killed never hold up their caller."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any
from unittest.mock import patch

import pytest

from culet.errors import BadRequest
from culet.line_process import START_LIMIT_S, LineProcess, Stopper
from culet.text.template import Chat, ChatTemplate, RenderLimits

HELLO = [{"role": "user", "content": "Hi"}]
DEAF = "print('{}', flush=True); import time; time.sleep(1000)"
ECHO = """
import sys
print('{}', flush=True)
for line in sys.stdin.buffer:
    print('{"size": %d}' % len(line), flush=True)
"""
LONG = "x" * (4 << 20)  # longer than any pipe


def start(code: str, purpose: str) -> LineProcess:
    """Run code instead of a module of Culet."""
    with patch("culet.line_process.python_command", lambda module: [sys.executable, "-c", code]):
        return LineProcess("test", purpose)


def own(source: str, **limits: float) -> ChatTemplate:
    return ChatTemplate({"default": source}, origin="test", empty_thought=False, limits=RenderLimits(**limits))


def test_writing_to_a_program_that_does_not_read_ends_in_time():
    process = start(DEAF, "sleeps")
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        process.ask(LONG, 0.5)
    assert 0.4 < time.monotonic() - began < 30
    process.end()


def test_a_program_that_gets_no_processor_time_is_waited_for():
    """On a busy machine a question may take much longer than its work. A program that sleeps looks the same."""
    process = start(
        "import time; print('{}', flush=True); input(); time.sleep(1); print('{\"done\": 1}', flush=True)", "sleeps"
    )
    assert process.ask("work", 0.5, max_wait_s=60.0) == {"done": 1}
    process.end()


def test_a_program_is_stopped_after_its_processor_time():
    process = start("print('{}', flush=True)\nwhile True: pass", "loops")
    with pytest.raises(TimeoutError):
        process.ask("work", 0.5, max_wait_s=1000.0)
    used_s = time.clock_gettime(~process.process_id << 3 | 2)
    assert used_s >= 0.5
    process.end()


def test_the_wait_is_limited_too():
    process = start(DEAF, "sleeps")
    with pytest.raises(TimeoutError):
        process.ask("work", 1000.0, max_wait_s=0.5)
    process.end()


def test_long_lines_arrive_whole():
    process = start(ECHO, "echoes")
    for line in (LONG, "short", LONG.encode(), "two\nlines"):
        assert process.ask(line, 60.0) == {"size": len(line) + 1}
    process.end()


def test_a_stopped_program_is_noticed_long_before_the_time_limit():
    process = start(ECHO, "echoes")
    os.kill(process.process_id, signal.SIGSTOP)
    for line in ("short", LONG):
        with pytest.raises(ConnectionError, match="stopped"):
            process.ask(line, 1000.0)
    process.end()


def test_a_stopped_template_process_is_replaced_and_the_question_asked_again():
    template = own("fine {{ messages[0].content }}", time_limit_s=300.0)
    assert template.render(HELLO) == "fine Hi"
    (process,) = template._idle
    for content in ("Hi", LONG):
        (process,) = template._idle
        os.kill(process.process_id, signal.SIGSTOP)
        assert template.render([{"role": "user", "content": content}]) == f"fine {content}"
        assert not process.is_alive
    assert template.num_replaced == 2
    template.close()


def test_a_killed_template_process_is_replaced_while_it_works():
    """The first process is killed while it renders. The second one answers."""
    template = own("{% for a in range(3000) %}{% for b in range(3000) %}{% endfor %}{% endfor %}fine", time_limit_s=300.0)
    template.warm_up()
    (process,) = template._idle
    timer = threading.Timer(0.2, process.kill)
    timer.start()
    assert template.render(HELLO) == "fine"
    timer.join()
    template.close()


def test_a_question_that_kills_its_process_is_asked_only_twice(monkeypatch):
    template = own("fine")
    template.warm_up()
    asked = []
    ask = LineProcess.ask

    def ask_and_die(process: LineProcess, line: str | bytes, limit_s: float) -> dict:
        if line == template._setup:
            return ask(process, line, limit_s)
        asked.append(process.process_id)
        process.kill()
        return process._receive(process._deadline(60))

    monkeypatch.setattr(LineProcess, "ask", ask_and_die)
    with pytest.raises(BadRequest, match="died, perhaps because it ran out of memory"):
        template.render(HELLO)
    assert len(set(asked)) == len(asked) == 2
    assert template.num_replaced == 2
    template.close()


def test_a_question_can_be_cancelled():
    """The process is killed at once, and no other one is asked. The next question gets a new process."""
    endless = "{% if messages[0].content == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    template = own(endless + "{% endfor %}{% endif %}fine", time_limit_s=1000.0)
    template.warm_up()
    (process,) = template._idle
    stopper = Stopper()
    timer = threading.Timer(0.5, stopper.stop)
    timer.start()
    with pytest.raises(BadRequest):
        template.render_chat(Chat([{"role": "user", "content": "loop"}]), stopper)
    timer.join()
    assert not process.is_alive
    assert template.num_replaced == 1
    with pytest.raises(BadRequest, match="cancelled"):
        template.render_chat(Chat(HELLO), stopper)  # it is too late, and no process is lost
    assert template.num_replaced == 1
    assert template.render(HELLO) == "fine"
    template.close()


def test_processes_work_side_by_side_up_to_their_number():
    template = own("{{ messages[0].content }}", num_processes=3)
    template.warm_up()
    before = {process.process_id for process in template._idle}
    assert len(before) == 3
    threads = [threading.Thread(target=template.render, args=(HELLO,)) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {process.process_id for process in template._idle} == before
    template.close()


def test_a_program_comes_after_the_process_that_started_it() -> None:
    """Linux compares priorities only within a session if it groups tasks by session, as it does by default."""
    process = start(ECHO, "echoes")
    own_niceness = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, process.process_id) == min(19, own_niceness + 10)
    assert os.getsid(process.process_id) == os.getsid(0)
    assert os.getpgid(process.process_id) != os.getpgid(0)  # Ctrl-C does not reach it
    process.end()


def test_a_template_that_has_compiled_gets_time_to_compile_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a new process takes long, and no client's conversation is the reason."""
    limits: list[float] = []
    ask = LineProcess.ask

    def note(self: LineProcess, line: str | bytes, limit_s: float) -> dict[str, Any]:
        limits.append(limit_s)
        return ask(self, line, 60)

    monkeypatch.setattr(LineProcess, "ask", note)
    template = own("{{ messages[0].content }}", time_limit_s=3.0)
    assert template.render(HELLO) == "Hi"
    assert limits == [18.0, 3.0]  # to compile, to render
    for process in template._idle:
        os.kill(process.process_id, signal.SIGKILL)
        process._process.wait(60)
    assert template.render(HELLO) == "Hi"
    assert limits[2:] == [START_LIMIT_S, 3.0]
