"""The layer between callers and the engine: turns prompts into engine messages, and updates into
text.

Shared by `LLM` and `AsyncLLM`. Deals with text and the engine's messages, not with torch or HTTP.
"""
