"""Start-up: a model's name and options in, a running engine out."""
