"""LlamaIndex."""

from checks import GREETING, MODEL, PERSON, TRANSLATE, URL, check_call, check_person, check_stream, run, translate
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

model = OpenAILike(
    model=MODEL,
    api_base=f"{URL}/v1",
    api_key="none",
    temperature=0,
    max_tokens=200,
    context_window=1024,
    is_chat_model=True,
    is_function_calling_model=True,
    should_use_structured_outputs=True,
)


class Person(BaseModel):
    name: str
    age: int


def plain() -> None:
    assert model.chat([ChatMessage(GREETING)]).message.content
    assert model.complete(GREETING).text


def stream() -> None:
    check_stream(chunk.delta for chunk in model.stream_chat([ChatMessage(GREETING)]))


def tools() -> None:
    tool = FunctionTool.from_defaults(translate)
    answer = model.chat_with_tools([tool], user_msg=TRANSLATE, tool_required=True)
    (call,) = model.get_tool_calls_from_response(answer)
    check_call(call.tool_name, call.tool_kwargs)


def structured() -> None:
    check_person(model.structured_predict(Person, PromptTemplate(PERSON)))


run(plain=plain, stream=stream, tools=tools, structured=structured)
