"""Structured output: an answer must match a schema, a regex or a grammar.

    request form  ->  GrammarSpec  ->  compiled grammar  ->  matcher      ->  mask
    (forms)           (types)          (compiler)            (matcher)        (compiler)

A request form is what a client asks for. A GrammarSpec says the same as plain text. It is checked in a limited process
(`check`), then compiled by threads while the request waits (`queue`). A matcher follows one sequence through its grammar and
says which tokens may come next.
"""
