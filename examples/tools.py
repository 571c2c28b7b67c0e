"""Let the model call a tool: its calls come parsed.

python examples/tools.py google/gemma-4-E2B-it
"""

import sys

from culet import LLM, SamplingParams

weather = {
    "name": "get_weather",
    "description": "The current weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
messages = [{"role": "user", "content": "What is the weather in Paris?"}]
params = SamplingParams(temperature=0, max_tokens=128)

with LLM(sys.argv[1], max_model_len=1024) as llm:
    tools = [{"type": "function", "function": weather}]
    [answer] = llm.chat(messages, params, tools=tools)
    calls = [{"id": call.id, "function": {"name": call.name, "arguments": call.arguments}} for call in answer.tool_calls]
    print([(call.name, call.arguments) for call in answer.tool_calls] or answer.text)
    if calls:
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "18 °C, light rain"} for call in calls]
        [answer] = llm.chat([*messages, {"role": "assistant", "tool_calls": calls}, *results], params, tools=tools)
        print(answer.text)
