"""The scheduler decides which tokens each step computes, and on which pages. Pure Python, no torch.

sequence        one sample of a request, with its tokens, its pages and its progress
group_pages     the pages of one sequence in one KV group
page_allocator  takes pages for sequences, evicts resume points, and lists page copies for the next step
budget          how many tokens a step may have, split between decode, drafts and prefill
rows            one row of a plan, with its size, its pages and its effect on the sequence
fairness        who goes first, and who makes way when there is no room
admission       which requests are rejected, and when a waiting sequence may start
reuse           where a sequence resumes, and which resume points it creates
draft_length    how many tokens to draft for each sequence
step_cost       the cost of steps, from a model and from measured times
scheduler       the main loop (schedule, apply, preempt, fork, finish)
"""
