"""The OpenAI-compatible HTTP server over an AsyncLLM. The only place that knows HTTP."""
