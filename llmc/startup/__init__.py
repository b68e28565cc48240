"""Startup: from a model's name and options to a running engine."""
