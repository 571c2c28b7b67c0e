"""Gemma 4's output read as thoughts, text and tool calls, however its tokens are grouped."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from culet.text.output_pieces import ReasoningPiece, TextPiece, ToolCall
from culet.text.output_reader import ChatReader
from culet.text.tokenizer import NoTokenizer, Tokenizer
from tests.unit.text.output_streams import CITY, MARKS, SCHEMA, SPECIAL, Q, answer, plain_ids, read, write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer(folder)


# Thoughts and text


def test_plain_text(tokenizer):
    pieces, output = read(tokenizer, tokenizer.encode("  hello <b> {a:1}\n<turn|>"))
    assert pieces == [TextPiece("  hello <b> {a:1}\n")]
    assert (output.reasoning, output.tool_calls, output.num_thought_tokens) == ("", (), 0)
    assert output.has_ended
    assert not answer(tokenizer, "cut of").has_ended
    assert answer(tokenizer, " \n").text == " \n"
    assert answer(tokenizer, "").text == ""


def test_thought_then_answer(tokenizer):
    ids = tokenizer.encode("<|channel>thought\nlet me see\n\n<channel|>the answer<turn|>")
    pieces, output = read(tokenizer, ids)
    assert pieces == [ReasoningPiece("let me see\n"), TextPiece("the answer")]
    assert output.num_thought_tokens == ids.index(tokenizer.token_id("<channel|>")) - 1


@pytest.mark.parametrize(
    ("thought", "reasoning"),
    [
        ("thought\n", ""),
        ("thought", ""),
        ("", ""),
        ("thought\n \n\n", ""),
        ("\n", ""),
        ("thought\nok", "ok"),
        ("thought\nok\n", "ok"),
        ("thought\n  ok \n", "  ok "),
        ("analysis\nok", "ok"),
        ("thoughtful of you", "thoughtful of you"),
        ("No label\nhere", "No label\nhere"),
        ("two words\nhere", "two words\nhere"),
        ("ok", "ok"),
        ("thought\nthought\nagain", "thought\nagain"),
        ("\n\nok", "\n\nok"),
        ("a" * 40 + "\nok", "a" * 40 + "\nok"),
    ],
)
def test_labels_and_empty_thoughts(tokenizer, thought, reasoning):
    output = answer(tokenizer, f"<|channel>{thought}<channel|>yes<turn|>")
    assert (output.reasoning, output.text) == (reasoning, "yes")


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning"),
    [
        ("<|turn>model\n<|channel>thought\n", "I see\n<channel|>yes", "I see"),
        ("<|turn>model\n<|channel>thought", "\nI see\n<channel|>yes", "I see"),
        ("<|turn>model\n<|channel>", "thought\nI see<channel|>yes", "I see"),
        ("<|turn>model\n<|channel>thought\nso far", " so good<channel|>yes", " so good"),
        ("<|turn>model\n<|channel>well", "done<channel|>yes", "done"),
        ("<|turn>model\n<|channel>thought\n", "<channel|>yes", ""),
        ("<|turn>model\n<|channel>thought\n<channel|>", "yes", ""),
        ("<|turn>user\n<|channel>thought\n<turn|>\n<|turn>model\n", "yes", ""),
        ("<tool_response|><|channel>thought\n", "thought\n<channel|>yes", "thought"),
        ("<|channel>thought\n<|turn>model\n", "yes", ""),
        ("", "yes", ""),
    ],
)
def test_prompt_with_an_open_channel(tokenizer, prompt, text, reasoning):
    output = answer(tokenizer, text, prompt_ids=tokenizer.encode(prompt))
    assert (output.reasoning, output.text) == (reasoning, "yes")


def test_in_reasoning_says_where_the_next_token_belongs(tokenizer):
    reader = ChatReader(tokenizer, prompt_ids=tokenizer.encode("<|channel>thought\n"))
    assert reader.in_reasoning
    reader.push(tokenizer.encode("hm<channel|>"))
    assert not reader.in_reasoning
    reader.push(tokenizer.encode("<|channel>"))
    assert reader.in_reasoning


def test_several_thoughts(tokenizer):
    pieces, _ = read(tokenizer, tokenizer.encode("<|channel>thought\none\n<channel|>a<|channel>thought\ntwo<channel|>b"))
    assert pieces == [ReasoningPiece("one"), TextPiece("a"), ReasoningPiece("\ntwo"), TextPiece("b")]


def test_thought_cut_off(tokenizer):
    assert answer(tokenizer, "<|channel>thou").reasoning == ""
    output = answer(tokenizer, "<|channel>thought\nand then ")
    assert (output.reasoning, output.text) == ("and then ", "")


@pytest.mark.parametrize("end", ["<turn|>", "<eos>", "<|tool_response>"])
def test_end_of_turn(tokenizer, end):
    output = answer(tokenizer, f"yes{end}no<|channel>thought\nhm<channel|>{CITY}")
    assert (output.text, output.reasoning, output.tool_calls, output.has_ended) == ("yes", "", (), True)
    assert answer(tokenizer, f"yes{end} go on", ignore_end=True).text == "yes go on"


def test_end_ids_and_other_special_tokens(tokenizer):
    output = answer(tokenizer, f"a<pad>b<|think|>{Q}<channel|><tool_call|><|image|>c!d", end_ids=tokenizer.encode("!"))
    assert (output.text, output.has_ended) == ("abc", True)


def test_markup_of_ordinary_tokens_is_text(tokenizer):
    looks = f"<|channel>thought\nhm<channel|>{CITY}<turn|>"
    pieces, output = read(tokenizer, plain_ids(tokenizer, looks))
    assert pieces == [TextPiece(looks)]
    assert not output.has_ended
    body = [*tokenizer.encode(f"<|tool_call>call:f{{a:{Q}"), *plain_ids(tokenizer, f'x{Q},b:1}}<tool_call|>"\\')]
    ids = [*body, *tokenizer.encode(f"{Q}}}<tool_call|>")]
    assert read(tokenizer, ids)[1].tool_calls[0].arguments == {"a": f'x{Q},b:1}}<tool_call|>"\\'}


def test_other_ids_and_no_ids(tokenizer, tmp_path):
    write_tokenizer(tmp_path, ["<pad>", "<new>", *reversed(SPECIAL[1:])])
    other = Tokenizer(tmp_path)
    assert other.token_id("<|tool_call>") != tokenizer.token_id("<|tool_call>")
    text = f"<|channel>thought\nhm\n<channel|>yes{CITY}<|tool_response>"
    assert read(other, other.encode(text))[0] == read(tokenizer, tokenizer.encode(text))[0]
    assert read(NoTokenizer(100), [48, 100, 7])[1].text == ""


# Tool calls


def test_a_call_comes_whole(tokenizer):
    pieces, output = read(tokenizer, tokenizer.encode(f"<|channel>thought\nhm\n<channel|>{CITY}<|tool_response>"))
    assert pieces == [ReasoningPiece("hm"), ToolCall(0, "id0", "weather", '{"city":"Paris"}', {"city": "Paris"})]
    assert output.tool_calls == (pieces[1],)
    with pytest.raises(AttributeError):
        pieces[0].text = ""


def test_call_after_a_thought_that_is_not_closed(tokenizer):
    output = answer(tokenizer, f"<|channel>thought\nI ask\n{CITY}<|tool_response>")
    assert (output.reasoning, output.text, len(output.tool_calls)) == ("I ask", "", 1)
    assert len(answer(tokenizer, f"<|channel>{CITY}").tool_calls) == 1


def test_parallel_calls_with_text_around(tokenizer):
    other = f"<|tool_call>call:time.now{{zone:{Q}{Q}}}<tool_call|>"
    pieces, output = read(tokenizer, tokenizer.encode(f"\n{CITY}\n{other}{CITY} \n<|tool_response>"))
    assert output.text == ""
    assert [(call.index, call.id, call.name) for call in output.tool_calls] == [
        (0, "id0", "weather"),
        (1, "id1", "time.now"),
        (2, "id2", "weather"),
    ]
    assert pieces == list(output.tool_calls)
    assert answer(tokenizer, f"first {CITY}\n then{CITY}").text == "first \n then"


# Unicode


def test_characters_spread_over_byte_tokens(tokenizer):
    face = tokenizer.encode("😀")
    assert len(face) == 4
    text = f"<|channel>thought\n😀é\n<channel|>ü😀<|tool_call>call:f{{ключ:{Q}日本😀{Q}}}<tool_call|>"
    output = answer(tokenizer, text)
    assert (output.reasoning, output.text) == ("😀é", "ü😀")
    assert output.tool_calls[0].arguments == {"ключ": "日本😀"}
    assert output.tool_calls[0].arguments_json == '{"ключ":"日本😀"}'


def test_characters_cut_off_stay_where_they_began(tokenizer):
    half, close = tokenizer.encode("😀")[:2], tokenizer.encode("<channel|>")
    ids = [*tokenizer.encode("<|channel>thought\nhm"), *half, *close, *half, *tokenizer.encode(f"<|tool_call>call:f{{a:{Q}")]
    ids += [*half, *tokenizer.encode(f"{Q}}}<tool_call|>x"), *half]
    output = read(tokenizer, ids)[1]
    assert (output.reasoning, output.text) == ("hm\ufffd", "\ufffdx\ufffd")
    assert output.tool_calls[0].arguments == {"a": "\ufffd"}
    broken = [*tokenizer.encode("<|tool_call>call:f{a:"), *half]
    assert read(tokenizer, broken)[1].text == tokenizer.decode(broken, skip_special=False)


# Stop strings


def test_stop_strings_end_only_the_text(tokenizer):
    text = f"<|channel>thought\nSTOP\n<channel|>a<|tool_call>call:f{{a:{Q}STOP{Q}}}<tool_call|>bST STOP no<|tool_call>"
    pieces, output = read(tokenizer, tokenizer.encode(text), stop=["STOP"])
    assert (output.text, output.stop, output.has_ended) == ("abST ", "STOP", True)
    assert (output.reasoning, output.tool_calls[0].arguments) == ("STOP", {"a": "STOP"})
    assert pieces[-1] == TextPiece("bST ")
    assert answer(tokenizer, "a ST", stop=["STOP"]).text == "a ST"
    assert answer(tokenizer, f"a ST{CITY}OP", stop=["STOP"]).text == "a STOP"
    for end in ("<tool_call|>", "<|channel>", "<|tool_call>", ""):
        for begin in ("<|tool_call>", "<|tool_call>call:"):
            output = answer(tokenizer, f"{begin}STOP{end}x", stop=["STOP"])
            assert (output.text, output.num_malformed, output.reasoning) == (begin, 1, "")
    pieces, _ = read(tokenizer, tokenizer.encode("<|tool_call>o ST<|channel>thought\nhm<channel|>"), stop=["STOP"])
    assert pieces == [TextPiece("<|tool_call>o ST", malformed=True), ReasoningPiece("hm")]


# Groupings

STREAMS = {
    "thought and parallel calls": f'<|channel>thought\nhm 😀\n\n<channel|>é\n{CITY} <|tool_call>call:f{{a:[1,{{b:{Q}日"{Q}}}]}}'
    "<tool_call|>\n<|tool_response>rest",
    "call in an open thought": f"<|channel>I see\n{CITY}text STOP more",
    "malformed": f"<|channel>thought\n<channel|>x<|tool_call>call:f{{a:{Q}ü{Q}b}}{Q}<pad><tool_call|> y{CITY}"
    '<|tool_call>call:g{s:"',
    "odd marks": f"<channel|>a<|channel><|channel>no label\n<tool_call|>{Q}<|channel>thought<channel|> <tool_call|> b <turn|>c",
    "other forms": '<|tool_call>:f{s:1}<|tool_call>:call:g(a="x, \\"y)",b=2)<|tool_call>call:g{"k":"é"} <turn|>',
    "plain": "hello 日本, <|tool_cal {a:1}\n",
}


@pytest.mark.parametrize("name", STREAMS)
def test_every_two_way_split(tokenizer, name):
    ids = tokenizer.encode(STREAMS[name])
    options = {"stop": ["STOP"], "schemas": {"f": SCHEMA}}
    whole = read(tokenizer, ids, **options)
    for cut in range(len(ids) + 1):
        assert read(tokenizer, ids, [cut], **options) == whole
    assert read(tokenizer, ids, range(len(ids)), **options) == whole


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(sorted(STREAMS)), cuts=st.lists(st.integers(0, 100), max_size=12), is_open=st.booleans())
def test_many_splits(tokenizer, name, cuts, is_open):
    ids = tokenizer.encode(STREAMS[name])
    prompt_ids = tokenizer.encode("<|channel>thought\n") if is_open else []
    cuts = [cut % (len(ids) + 1) for cut in cuts]
    assert read(tokenizer, ids, cuts, prompt_ids=prompt_ids) == read(tokenizer, ids, prompt_ids=prompt_ids)


BYTES = ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
WORDS = ["call:", "call:f{", "thought", "\n", "true", *'{}[],:ab1- "\\']
TOKENS = st.sampled_from([*MARKS, "<|tool_call>", "<tool_call|>", Q, "<pad>", "<turn|>", *BYTES, *WORDS])


@settings(max_examples=400, deadline=None)
@given(tokens=st.lists(TOKENS, max_size=40), data=st.data())
def test_any_tokens_at_all(tokenizer, tokens, data):
    """Any tokens can be read without an exception, the grouping does not matter, and `check` holds."""
    ids = []
    for token in tokens:
        known = tokenizer.token_id(token)
        ids += [known] if known is not None else tokenizer.encode(token)
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=8))
    options = data.draw(
        st.fixed_dictionaries({"ignore_end": st.booleans(), "stop": st.sampled_from([(), ("a",), ("},", "ab")])})
    )
    assert read(tokenizer, ids, cuts, **options) == read(tokenizer, ids, **options)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|turn>model\nhello", "hello"),
        ("<|turn>model\n<|channel>thought\nhm\n<channel|>hello", "hello"),
        ("<|turn>model", "model"),
        ("<|turn>models are", "models are"),
        ("<|turn>user\nhi", "user\nhi"),
        ("a <|turn>model\nb", "a model\nb"),
    ],
)
def test_a_role_at_the_start_is_dropped(tokenizer, text, expected):
    ids = tokenizer.encode(text)
    whole = read(tokenizer, ids)
    assert whole[1].text == expected
    for cut in range(len(ids) + 1):
        assert read(tokenizer, ids, [cut]) == whole
