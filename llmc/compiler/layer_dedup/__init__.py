"""Capture one decoder layer of each kind and repeat it, so that deep models capture fast."""
