"""What becomes of messages before a template sees them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from culet.errors import BadRequest
from culet.text.messages import check_messages, read_template_options
from culet.text.template import ChatTemplate

USER = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatTemplate]:
    folder: Path = tmp_path_factory.mktemp("none")
    template = ChatTemplate.of_checkpoint(folder, empty_thought=False)
    yield template
    template.close()


def names(template: ChatTemplate, calls: list[tuple[str | None, str]], results: list[dict[str, str]]) -> list[str]:
    """Return the names that the results have in the prompt."""
    given: list[Any] = [{"function": {"name": name, "arguments": {}}} | ({"id": id_} if id_ else {}) for id_, name in calls]
    answers = [{"role": "tool", "content": "r", **result} for result in results]
    text = template.render([USER, {"role": "assistant", "tool_calls": given}, *answers])
    return [part.partition("{")[0] for part in text.split("response:")[1:]]


@pytest.mark.parametrize(
    ("calls", "results", "expected"),
    [
        ("1f 1g", "1 1", "f g"),  # calls that share an id
        ("1f 1g 2h", "2 1 1", "f g h"),
        ("1f 1g", "1 1 1", "f g g"),
        ("1f 2g", "8 9", "f g"),  # results whose ids are unknown
        ("1f 2g", "2 9", "f g"),
        ("1f 2g", "9 1", "f g"),
        ("1f 2g", "1 1", "f f"),  # a second result of the same call
        ("1f 2g", "7 8 9", "f g unknown"),
        ("-f -g -h", "- - -", "f g h"),
        ("1f 2g 3h", "-g - -", "f g h"),  # a name
        ("1f 2f 3g", "-f - -", "f f g"),
        ("1f 2g", "9other -", "f other"),
    ],
)
def test_results_belong_to_calls(template: ChatTemplate, calls: str, results: str, expected: str) -> None:
    """A call is its id and its name, a result the id of its call and perhaps a name. `-` means no id."""
    made = [(call[0] if call[0] != "-" else None, call[1:]) for call in calls.split()]
    given = []
    for result in results.split():
        known = {"tool_call_id": result[0], "name": result[1:]}
        given.append({key: value for key, value in known.items() if value and value != "-"})
    assert names(template, made, given) == expected.split()


def calls_of(*ids: str) -> dict[str, Any]:
    made = [{"id": id_, "function": {"name": "weather", "arguments": {"city": id_}}} for id_ in ids]
    return {"role": "assistant", "tool_calls": made}


def results_of(*ids: str) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": id_, "content": f"sun in {id_}"} for id_ in ids]


@pytest.mark.parametrize("order", ["a b c", "c a b", "c b a"])
def test_results_are_in_the_order_of_their_calls(template: ChatTemplate, order: str) -> None:
    """The prompt has no ids. Clients that run tools at the same time send results as they come."""
    given = order.split()
    text = template.render([USER, calls_of("a", "b", "c"), *results_of(*given)])
    assert text == template.render([USER, calls_of("a", "b", "c"), *results_of(*sorted(given))])
    assert [text.index(f"sun in {id_}") for id_ in sorted(given)] == sorted(text.index(f"sun in {id_}") for id_ in given)


@pytest.mark.parametrize(("given", "missing"), [("b", "a"), ("a", "b"), ("a c", "b")])
def test_a_call_without_a_result_beside_others_is_refused(given: str, missing: str) -> None:
    calls = calls_of("a", "b", "c") if " " in given else calls_of("a", "b")
    with pytest.raises(BadRequest, match=f"the call of weather with the id '{missing}' has no result"):
        check_messages([USER, calls, *results_of(*given.split())])
    assert check_messages([USER, calls, USER]), "a client may drop the results of a turn"


def test_text_after_a_call_belongs_to_the_message_with_the_call(template: ChatTemplate) -> None:
    said = {"role": "assistant", "content": "One moment."}
    given = [USER, {"role": "assistant", "content": "I look. "}, calls_of("a"), said, *results_of("a")]
    joined = {**calls_of("a"), "content": "One moment."}
    assert template.render(given) == template.render([*given[:2], joined, given[-1]])
    before = {**calls_of("a"), "content": [{"type": "text", "text": "I look. "}]}
    both = check_messages([USER, before, said, *results_of("a")])
    assert [message["role"] for message in both] == ["user", "assistant", "tool"]
    assert [part["text"] for part in both[1]["content"]] == ["I look. ", "One moment."]


def test_results_with_media_keep_their_order() -> None:
    """The media of a request are in the order of its messages."""
    results = [{**result, "content": [{"type": "image"}]} for result in results_of("b", "a")]
    assert [result["tool_call_id"] for result in check_messages([USER, calls_of("a", "b"), *results])[2:]] == ["b", "a"]


def test_calls_may_be_in_several_messages(template: ChatTemplate) -> None:
    text = template.render([USER, calls_of("a"), calls_of("b"), *results_of("b", "a")])
    assert "unknown" not in text
    assert text.index("sun in a") < text.index("sun in b")


@pytest.mark.parametrize("fields", [{"content": None}, {}, {"content": None, "tool_calls": []}, {"content": ""}])
@pytest.mark.parametrize("thought", [None, "Hm."])
def test_an_assistant_may_say_nothing(template: ChatTemplate, fields: dict[str, Any], thought: str | None) -> None:
    thoughts = {} if thought is None else {"reasoning_content": thought}
    empty = {"role": "assistant", **fields, **thoughts}
    text = template.render([USER, empty, USER])
    assert text == template.render([USER, {"role": "assistant", "content": "", **thoughts}, USER])
    assert "<|turn>model\n<turn|>\n" in text
    # After the last message of a user, the model sees its thought.
    assert ("Hm." in template.render([USER, empty])) is (thought is not None)


def test_the_options_of_templates_are_checked() -> None:
    assert read_template_options(None) == {}
    assert read_template_options({"enable_thinking": None, "preserve_thinking": True}) == {"preserve_thinking": True}
    bad: Any
    for bad, problem in (
        ({"bogus": 1}, "chat_template_kwargs: got 'bogus', expected enable_thinking or preserve_thinking"),
        ({"enable_thinking": "false"}, "chat_template_kwargs.enable_thinking: got 'false', expected True or False"),
        ("x", "chat_template_kwargs: got str, expected a mapping"),
    ):
        with pytest.raises(BadRequest) as caught:
            read_template_options(bad)
        assert caught.value.message == problem


@pytest.mark.parametrize("arguments", ['{"a": NaN}', '{"a": [-Infinity]}', "{"])
def test_arguments_that_are_not_json(template: ChatTemplate, arguments: str) -> None:
    """Python would read NaN and infinities, which JSON does not have."""
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(BadRequest, match=r"^messages\[1\]\.tool_calls\[0\]\.function\.arguments: not valid JSON"):
        template.render([USER, {"role": "assistant", "tool_calls": [call]}])
