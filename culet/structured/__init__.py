"""Structured output, which makes an answer match a schema, a regex or a grammar.

    request fields    ->  GrammarSpec  ->  compiled grammar  ->  matcher      ->  mask
    (request_fields)      (types)          (compiler)            (matcher)        (compiler)

A client sends request fields. A GrammarSpec states the same constraint as plain text. It is checked in a process with limited
time and memory (`check`), then compiled in a thread while the request waits (`queue`). A matcher follows one sequence through
its grammar and says which tokens may come next.
"""
