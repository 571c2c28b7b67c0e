"""Which tokens are computed in which step, and on which pages: pure Python, no torch.

sequence        one sample of a request: its tokens, its pages, how far it is computed
group_pages     the pages of one sequence in one KV group
page_allocator  pages for sequences: the arena, resume points that give way, copies that the next step makes
budget          how a step's tokens are shared between decode, drafts and prefill
rows            one row of a plan: its size, its pages, what it does to its sequence
admission       what is refused, and when a waiting sequence may start
reuse           where a sequence resumes, and which resume points it leaves
draft_length    how many tokens to draft for each sequence
step_cost       what steps cost, by a model and by measured times
scheduler       the loop: schedule, apply, preempt, fork, finish
"""
