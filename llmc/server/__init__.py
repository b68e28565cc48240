"""The HTTP server over an AsyncLLM, with several APIs. The only place that knows HTTP."""
