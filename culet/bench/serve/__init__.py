"""`culet bench serve`: load-test any server with OpenAI's API and measure what its clients see.

client   sends a request, streams the answer and times every event
load     random prompts that arrive over time, alone or beside running chats
figures  figures of a run, with the names and the printed block of `vllm bench serve`
agent    sessions of an agent that grow turn by turn, with and without the prefix cache
"""
