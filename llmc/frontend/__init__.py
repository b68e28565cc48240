"""Between callers and the engine: prompts in, engine messages out, updates back into text.

`LLM` and `AsyncLLM` share all of it. Knows text and the engine's messages; knows no torch and no
HTTP.
"""
