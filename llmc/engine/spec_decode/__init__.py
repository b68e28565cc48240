"""Speculative decoding: proposers of draft tokens and the switch that turns them off."""
