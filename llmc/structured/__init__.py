"""Structured outputs: from a grammar to the mask of allowed next tokens.

    frontend: StructuredOutputsParams --trial (a process that may crash)--> accepted, or an error
    engine:  StructuredOutputsParams -> Matcher: mask() before each draw, accept() after it

Built on llguidance (Earley parser and derivative lexer over the tokenizer's trie, in Rust). It
compiles lazily, so no request waits for a grammar, and the cost of every step is bounded.
"""
