"""Structured outputs: from a grammar to the mask of tokens that may come next.

    frontend: StructuredOutputs --trial (a process that may crash)--> accepted, or a clear error
    engine:  StructuredOutputs -> Matcher: mask() before each draw, accept() after it

Built on llguidance (Earley parser and derivative lexer over the tokenizer's trie, in Rust): it
compiles lazily, so no request waits for a grammar, and every step of it is bounded.
"""
