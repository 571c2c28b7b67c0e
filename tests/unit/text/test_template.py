"""Chat templates: the built-in one compared with the documented format, those of checkpoints, and faulty ones."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from culet.errors import BadRequest, CheckpointError
from culet.text.template import BUILT_IN, Chat, ChatTemplate, RenderLimits

USER = {"role": "user", "content": "Hi"}


def built_in(empty_thought: bool) -> ChatTemplate:
    return ChatTemplate({"default": BUILT_IN.read_text()}, origin="built-in", empty_thought=empty_thought)


@pytest.fixture(scope="module")
def large():
    """The template of the 12B, 26B-A4B and 31B."""
    template = built_in(True)
    yield template
    template.close()


@pytest.fixture(scope="module")
def small():
    """The template of the E2B and E4B."""
    template = built_in(False)
    yield template
    template.close()


def own(source: str, **options) -> ChatTemplate:
    return ChatTemplate({"default": source}, origin="test", empty_thought=False, **options)


# The built-in template


def test_generation_prompt_of_both_families(large, small):
    assert large.render([USER]) == "<bos><|turn>user\nHi<turn|>\n<|turn>model\n<|channel>thought\n<channel|>"
    assert small.render([USER]) == "<bos><|turn>user\nHi<turn|>\n<|turn>model\n"
    thinking = "<bos><|turn>system\n<|think|>\n<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\n"
    assert large.render([USER], enable_thinking=True) == thinking
    assert small.render([USER], enable_thinking=True) == thinking
    assert large.render([USER], add_generation_prompt=False) == "<bos><|turn>user\nHi<turn|>\n"


@pytest.mark.parametrize("role", ["system", "developer"])
def test_system_message(small, role):
    messages = [{"role": role, "content": " Be brief. "}, {"role": "user", "content": "  Hi \n"}]
    rest = "<|turn>user\nHi<turn|>\n<|turn>model\n"
    assert small.render(messages) == "<bos><|turn>system\nBe brief.<turn|>\n" + rest
    assert small.render(messages, enable_thinking=True) == "<bos><|turn>system\n<|think|>\nBe brief.<turn|>\n" + rest
    messages[0]["content"] = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
    assert small.render(messages) == "<bos><|turn>system\nOne. Two. <turn|>\n" + rest


def test_turns_and_parts(small):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": " a "}, {"type": "text", "text": "b "}]},
        {"role": "assistant", "content": "One."},
        {"role": "model", "content": "Two."},  # continues the same turn
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "Three."},
    ]
    expected = (
        "<bos><|turn>user\nab<turn|>\n<|turn>model\nOne.Two.<turn|>\n<|turn>user\nc<turn|>\n<|turn>model\nThree.<turn|>\n"
    )
    assert small.render(messages, add_generation_prompt=False) == expected
    assert small.render(messages) == expected + "<|turn>model\n"


def test_thoughts_of_earlier_turns_are_dropped(small):
    messages = [
        USER,
        {"role": "assistant", "content": "<|channel>thought\nhm\n<channel|>Hello", "reasoning": "old"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "sure", "reasoning_content": "new"},
    ]
    assert small.render(messages, add_generation_prompt=False) == (
        "<bos><|turn>user\nHi<turn|>\n<|turn>model\nHello<turn|>\n<|turn>user\nmore<turn|>\n"
        "<|turn>model\n<|channel>thought\nnew\n<channel|>sure<turn|>\n"
    )


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "unit": {"type": "string", "enum": ["c", "f"]},
                "city": {"type": "string", "description": "Name of the city"},
            },
            "required": ["city"],
        },
    },
}
WEATHER_TEXT = (
    '<|tool>declaration:get_weather{description:<|"|>Weather of a city<|"|>,parameters:{properties:{'
    'city:{description:<|"|>Name of the city<|"|>,type:<|"|>STRING<|"|>},'
    'unit:{enum:[<|"|>c<|"|>,<|"|>f<|"|>],type:<|"|>STRING<|"|>}},'
    'required:[<|"|>city<|"|>],type:<|"|>OBJECT<|"|>}}<tool|>'
)


def test_tool_declaration(small):
    rest = "<|turn>user\nHi<turn|>\n<|turn>model\n"
    assert small.render([USER], tools=[WEATHER]) == f"<bos><|turn>system\n{WEATHER_TEXT}<turn|>\n{rest}"
    both = small.render([{"role": "system", "content": "Be brief."}, USER], tools=[WEATHER, WEATHER], enable_thinking=True)
    assert both == f"<bos><|turn>system\n<|think|>\nBe brief.{WEATHER_TEXT}{WEATHER_TEXT}<turn|>\n{rest}"
    assert small.render([USER], tools=[]) == f"<bos>{rest}"


def test_tool_declaration_with_nested_schema(small):
    parameters = {
        "type": "object",
        "properties": {
            "where": {
                "type": "object",
                "nullable": True,
                "properties": {"lat": {"type": "number"}, "Lon": {"type": "number", "description": "east"}},
                "required": ["lat", "Lon"],
            },
            "tags": {"type": "array", "description": "labels", "items": {"type": "string", "maxLength": 5, "enum": ["a"]}},
            "free": {"type": "object"},
            "rows": {
                "type": "array",
                "items": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
            },
        },
    }
    text = small.render([USER], tools=[{"function": {"name": "f", "parameters": parameters}}])
    declaration = text.partition("<|tool>")[2].partition("<tool|>")[0]
    assert declaration == (
        'declaration:f{description:<|"|><|"|>,parameters:{properties:{'
        'free:{properties:{},type:<|"|>OBJECT<|"|>},'
        'rows:{items:{properties:{x:{type:<|"|>INTEGER<|"|>}},required:[<|"|>x<|"|>],type:<|"|>OBJECT<|"|>},'
        'type:<|"|>ARRAY<|"|>},'
        'tags:{description:<|"|>labels<|"|>,items:{enum:[<|"|>a<|"|>],maxLength:5,type:<|"|>STRING<|"|>},type:<|"|>ARRAY<|"|>},'
        'where:{nullable:true,properties:{lat:{type:<|"|>NUMBER<|"|>},'
        'Lon:{description:<|"|>east<|"|>,type:<|"|>NUMBER<|"|>}},'
        'required:[<|"|>lat<|"|>,<|"|>Lon<|"|>],type:<|"|>OBJECT<|"|>}},'
        'type:<|"|>OBJECT<|"|>}}'
    )


def asks(*calls: tuple[str, str, dict], **extra) -> dict:
    tool_calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in calls
    ]
    return {"role": "assistant", "content": None, "tool_calls": tool_calls, **extra}


def test_tool_calls_and_results(small, large):
    arguments = {"unit": "c", "city": "Ulm", "days": 2, "deep": {"b": [True, None, 1.5], "a": "x"}, "ok": False}
    call_text = (
        '<|tool_call>call:get_weather{city:<|"|>Ulm<|"|>,days:2,deep:{a:<|"|>x<|"|>,b:[true,null,1.5]},'
        'ok:false,unit:<|"|>c<|"|>}<tool_call|>'
    )
    head = "<bos><|turn>user\nHi<turn|>\n<|turn>model\n"
    messages = [USER, asks(("1", "get_weather", arguments))]
    # The call waits for its result, so the model's stop token is already there.
    assert small.render(messages) == f"{head}{call_text}<|tool_response>"
    messages.append({"role": "tool", "tool_call_id": "1", "content": "17 degrees"})
    result_text = '<|tool_response>response:get_weather{value:<|"|>17 degrees<|"|>}<tool_response|>'
    for template in (small, large):  # generation continues inside the turn, without an empty thought
        assert template.render(messages) == f"{head}{call_text}{result_text}"
    assert small.render(messages, enable_thinking=True).endswith(f"{result_text}<|channel>thought\n")
    messages.append({"role": "assistant", "content": "It is warm."})
    assert small.render(messages, add_generation_prompt=False) == f"{head}{call_text}{result_text}It is warm.<turn|>\n"
    messages.append({"role": "user", "content": "Thanks"})
    assert small.render(messages) == (
        f"{head}{call_text}{result_text}It is warm.<turn|>\n<|turn>user\nThanks<turn|>\n<|turn>model\n"
    )


def test_parallel_calls_and_object_results(small):
    messages = [
        USER,
        asks(("a", "f", {}), ("b", "g", {"x": 1}), reasoning="two at once"),
        {"role": "tool", "tool_call_id": "b", "content": {"z": 1, "k": "v"}},
        {"role": "tool", "name": "f", "content": [{"type": "text", "text": "p"}, {"type": "text", "text": "q"}]},
    ]
    assert small.render(messages) == (
        "<bos><|turn>user\nHi<turn|>\n<|turn>model\n<|channel>thought\ntwo at once\n<channel|>"
        "<|tool_call>call:f{}<tool_call|><|tool_call>call:g{x:1}<tool_call|>"
        '<|tool_response>response:f{value:<|"|>pq<|"|>}<tool_response|>'
        '<|tool_response>response:g{k:<|"|>v<|"|>,z:1}<tool_response|>'
    )


def test_a_result_without_an_id_belongs_to_the_call_at_its_position(small):
    results = [{"role": "tool", "content": "p"}, {"role": "tool", "content": "q"}, {"role": "tool", "content": "r"}]
    text = small.render([USER, asks(("a", "f", {}), ("b", "g", {})), *results])
    assert [part.partition("{")[0] for part in text.split("response:")[1:]] == ["f", "g", "unknown"]
    empty = [{**result, "tool_call_id": ""} for result in results[:2]]
    text = small.render([USER, asks(("", "f", {}), ("", "g", {})), *empty])
    assert [part.partition("{")[0] for part in text.split("response:")[1:]] == ["f", "g"]
    mixed = [{"role": "tool", "tool_call_id": "b", "content": "q"}, {"role": "tool", "content": "p"}]
    text = small.render([USER, asks(("a", "f", {}), ("b", "g", {})), *mixed])
    assert [part.partition("<tool")[0] for part in text.split("response:")[1:]] == [
        'f{value:<|"|>p<|"|>}',
        'g{value:<|"|>q<|"|>}',
    ]


def test_a_turn_with_text_and_a_call_stays_open_for_the_answer(small):
    messages = [USER, asks(("1", "f", {}), content="Let me see."), {"role": "tool", "tool_call_id": "1", "content": "r"}]
    text = small.render(messages)
    assert text.endswith('<|tool_response>response:f{value:<|"|>r<|"|>}<tool_response|>Let me see.')
    assert small.render([*messages, USER]).endswith("Let me see.<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\n")


def test_preserved_thinking(small):
    messages = [USER, asks(("1", "f", {}), reasoning="why"), {"role": "tool", "tool_call_id": "1", "content": "r"}, USER]
    assert "why" not in small.render(messages)
    assert "<|channel>thought\nwhy\n<channel|><|tool_call>" in small.render(messages, options={"preserve_thinking": True})


def test_special_characters_pass_unchanged(small):
    text = "<b>&amp;\"'ü你好{{ x }}{% raw %}"
    assert text in small.render([{"role": "user", "content": text}])


# Bad messages


@pytest.mark.parametrize(
    ("messages", "error", "message"),
    [
        ([], BadRequest, "messages: got an empty list"),
        ("Hi", BadRequest, "messages: got str"),
        ({"role": "user"}, BadRequest, "messages: got dict"),
        (["Hi"], BadRequest, r"messages\[0\]: got str"),
        ([{"content": "Hi"}], BadRequest, r"messages\[0\]: got no role"),
        ([USER, {"role": "robot", "content": "Hi"}], BadRequest, r"messages\[1\]: got role 'robot'"),
        ([{"role": "user"}], BadRequest, r"messages\[0\]: got no content"),
        ([{"role": "user", "content": 3}], BadRequest, r"messages\[0\].content: got int"),
        ([{"role": "user", "content": {"a": 1}}], BadRequest, r"messages\[0\].content: got dict"),
        ([{"role": "user", "content": ["Hi"]}], BadRequest, r"content\[0\]: got str"),
        ([{"role": "user", "content": [{"type": "poem"}]}], BadRequest, "'poem'"),
        ([{"role": "user", "content": [{"type": "text"}]}], BadRequest, r"content\[0\].text: got NoneType"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], BadRequest, "expected one of text, audio"),
        ([{"role": "user", "content": [{"type": "hologram"}]}], BadRequest, "expected one of text, audio, image, video"),
        ([{"role": "user", "content": "x", "tool_calls": []}], BadRequest, "tool_calls in a user message"),
        ([asks(("1", "f", '{"a": 1'))], BadRequest, "arguments: not valid JSON"),
        ([asks(("1", "f", [1]))], BadRequest, "arguments: got list"),
        ([{"role": "assistant", "tool_calls": [{"name": "f"}]}], BadRequest, r"tool_calls\[0\]"),
        ([{"role": "assistant", "tool_calls": {"a": 1}}], BadRequest, "tool_calls: got dict"),
        ([{"role": "assistant", "tool_calls": [{"id": [], "function": {"name": "f"}}]}], BadRequest, r"\[0\].id: got list"),
        ([USER, {"role": "assistant", "content": "x", "reasoning": 3}], BadRequest, "reasoning: got int"),
        ([USER, {"role": "tool", "content": "r"}], BadRequest, "must follow an assistant message with tool_calls"),
        ([{"role": "user", "content": "x", "extra": object()}], BadRequest, "cannot convert them to JSON"),
    ],
)
def test_bad_messages(small, messages, error, message):
    with pytest.raises(error, match=message):
        small.render(messages)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("f", "tools: got str"),
        ([{"name": "f"}], r"tools\[0\]"),
        ([{"function": {"name": 3}}], r"tools\[0\]"),
        ([{"function": {"name": "f", "parameters": "x"}}], "parameters: got str"),
    ],
)
def test_bad_tools(small, tools, message):
    with pytest.raises(BadRequest, match=message):
        small.render([USER], tools=tools)


def test_reserved_option_names(small):
    for name in ("messages", "bos_token", "enable_thinking"):
        with pytest.raises(BadRequest, match=name):
            small.render([USER], options={name: 1})


def test_very_deep_nesting_is_refused(small):
    schema: dict = {"type": "object"}
    for _ in range(600):
        schema = {"type": "object", "properties": {"p": schema}}
    with pytest.raises(BadRequest):
        small.render([USER], tools=[{"function": {"name": "f", "parameters": schema}}])
    assert small.render([USER])  # the next conversation is rendered


# Templates of checkpoints


def test_the_checkpoints_template_takes_precedence(tmp_path):
    assert ChatTemplate.of_checkpoint(tmp_path, empty_thought=False).origin == "built-in"
    config = {"bos_token": {"content": "[B]"}, "eos_token": "[E]", "chat_template": "config {{ bos_token }}{{ eos_token }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = ChatTemplate.of_checkpoint(tmp_path, empty_thought=False)
    assert (template.origin, template.render([USER])) == ("tokenizer_config.json", "config [B][E]")
    (tmp_path / "chat_template.jinja").write_text("file {{ messages[0].content }}")
    template = ChatTemplate.of_checkpoint(tmp_path, empty_thought=False)
    assert (template.origin, template.render([USER])) == ("chat_template.jinja", "file Hi")


def test_named_templates(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.of_checkpoint(tmp_path, empty_thought=False)
    assert template.render([USER]) == "plain"
    assert template.render([USER], tools=[WEATHER]) == "tools"
    path.write_text(json.dumps({"chat_template": named[1:]}))
    with pytest.raises(CheckpointError, match="expected one named default"):
        ChatTemplate.of_checkpoint(tmp_path, empty_thought=False)
    path.write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: cannot read the file"):
        ChatTemplate.of_checkpoint(tmp_path, empty_thought=False)


def test_environment_has_what_templates_expect():
    source = (
        "{% for m in messages %}\n    {% if loop.first %}\n{{ m | tojson }}\n    {% endif %}\n{% endfor %}"
        "{% generation %}g{% endgeneration %}{{ strftime_now('%Y') | length }}"
        "{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    )
    template = own(source)
    assert template.render([{"role": "user", "content": "<ü>"}]) == '{"role": "user", "content": "<ü>"}\ng41'


def test_matches_transformers_environment():
    """The text is the same as from `apply_chat_template`, for a template that depends on whitespace rules and filters."""
    from transformers.utils.chat_template_utils import render_jinja_template

    source = BUILT_IN.read_text()
    messages = [{"role": "system", "content": "S"}, USER, {"role": "assistant", "content": " A "}, USER]
    rendered, _ = render_jinja_template(
        conversations=[messages], tools=[WEATHER], chat_template=source, add_generation_prompt=True, bos_token="<bos>"
    )
    assert own(source).render(messages, tools=[WEATHER]) == rendered[0]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('only two roles') }}", "only two roles"),
        ("{{ messages[7].content.text }}", "no element 7|undefined"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for i in range(10**9) %}{% endfor %}", "[Rr]ange too big"),
        ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "longer than"),
        ("{{ ('a' * 10**10) | length }}", "memory"),
    ],
)
def test_template_errors_are_bad_requests(source, message):
    template = own(source)
    with pytest.raises(BadRequest, match=message):
        template.render([USER])


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% unknown %}"])
def test_a_broken_template_is_a_checkpoint_error(source):
    template = own(source)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"chat template \(test\)"):
            template.render([USER])


RUNAWAYS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "C code": "{% set n = messages | length + 8 %}{{ n ** (n ** n) }}",
    "while compiling": "{{ 9 ** (9 ** 9) }}",
}


@pytest.mark.parametrize("name", RUNAWAYS)
def test_runaway_template_is_stopped(name):
    template = own(RUNAWAYS[name], limits=RenderLimits(time_limit_s=0.5))
    with pytest.raises(BadRequest, match=r"stopped after (0\.5|3) s"):
        template.render([USER])
    assert all(process.is_alive for process in template._idle)


@pytest.mark.parametrize("said", ["{{ messages[0]['content'] }}", "{{ messages[0]['content'] | trim }}"])
@pytest.mark.parametrize("end", ["<turn|>\n", "<turn|>", "\n", ""])
@pytest.mark.parametrize("text", ["a b", "a b ", "a b\n\n", " a\n b\t"])
def test_a_continued_message_ends_where_its_text_ends(said, end, text):
    chat = Chat([{"role": "assistant", "content": text}], continued=text)
    prompt = own("<|turn>model\n" + said + end).render_chat(chat).text
    assert prompt.removeprefix("<|turn>model\n") == (text if "trim" not in said else text.lstrip())


def test_rendering_continues_after_a_runaway():
    source = "{% if messages[0].content == 'loop' %}" + RUNAWAYS["nested loops"] + "{% endif %}fine"
    template = own(source, limits=RenderLimits(time_limit_s=3.0))
    process_ids = []
    for content, is_fine in (("x", True), ("loop", False), ("x", True), ("y", True)):
        if is_fine:
            assert template.render([{"role": "user", "content": content}]) == "fine"
            process_ids.append(template._idle[0].process_id)
        else:
            with pytest.raises(BadRequest):
                template.render([{"role": "user", "content": content}])
    assert process_ids[0] != process_ids[1] == process_ids[2]  # only the runaway template causes a new process


def test_a_killed_process_is_replaced():
    template = own("fine")
    template.render([USER])
    (process,) = template._idle
    process.kill()
    assert template.render([USER]) == "fine"


def test_process_ends_with_its_template():
    template = own("fine")
    template.render([USER])
    (process,) = template._idle
    template.close()
    assert not process.is_alive
    template.render([USER])
    popen = template._idle[0]._process
    del template, process
    assert popen.poll() is not None


def test_several_threads_share_a_template():
    template, before = own("{{ messages[0].content }}"), {*threading.enumerate()}
    with ThreadPoolExecutor(8) as pool:
        texts = [f"message {index} " + "x" * (index * 5000) for index in range(32)]
        rendered = list(pool.map(lambda text: template.render([{"role": "user", "content": text}]), texts))
    assert rendered == texts
    assert {*threading.enumerate()} <= before


def test_long_conversations_stay_within_the_time_limit(small):
    messages = [USER, {"role": "assistant", "content": "x" * 200}] * 1500 + [USER]
    assert len(small.render(messages)) > 300_000


def test_no_process_without_a_message():
    before = len(os.listdir("/proc/self/fd"))
    template = built_in(True)
    assert not template._idle
    assert len(os.listdir("/proc/self/fd")) <= before  # garbage of earlier tests may have been closed


# Templates of real checkpoints


def test_a_template_that_forgets_the_models_turn(tmp_path):
    """Google's template of July 2026 closes a turn with text, a call and its result, and opens no other."""
    source = "{{ bos_token }}{% for message in messages %}<|turn>{{ message.role }}\n{{ message.content }}<turn|>\n{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(source)
    template = ChatTemplate.of_checkpoint(tmp_path, empty_thought=True)
    assert template.render([USER]).endswith("Hi<turn|>\n<|turn>model\n<|channel>thought\n<channel|>")
    assert template.render([USER], enable_thinking=True).endswith("Hi<turn|>\n<|turn>model\n")
    assert template.render([USER], add_generation_prompt=False).endswith("Hi<turn|>\n")


def test_problems_of_templates(tmp_path, small):
    assert small.find_problem() == ""
    sources = {
        "{% for message in messages %}<|turn>{{ message.role }}\n{% endfor %}": "turns of their own",
        "{% for message in messages %}{{ raise_exception('no') if message.role == 'tool' }}{% endfor %}": "cannot show",
    }
    for source, problem in sources.items():
        (tmp_path / "chat_template.jinja").write_text(source)
        assert problem in ChatTemplate.of_checkpoint(tmp_path, empty_thought=False).find_problem()


def test_a_chosen_template(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("the checkpoint's")
    (tmp_path / "own.jinja").write_text("my own")
    for chosen, text, origin in (
        (None, "the checkpoint's", "chat_template.jinja"),
        (str(tmp_path / "own.jinja"), "my own", "own.jinja"),
        ("built-in", "<bos><|turn>user\nHi<turn|>\n<|turn>model\n", "built-in"),
    ):
        template = ChatTemplate.of_checkpoint(tmp_path, chosen, empty_thought=False)
        assert (template.render([USER]), template.origin) == (text, origin)
    with pytest.raises(CheckpointError, match=r"none.jinja: cannot read the file"):
        ChatTemplate.of_checkpoint(tmp_path, str(tmp_path / "none.jinja"), empty_thought=False)
