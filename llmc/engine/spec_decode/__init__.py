"""Speculative decoding: draft token proposers, and the policy that switches them on and off."""
