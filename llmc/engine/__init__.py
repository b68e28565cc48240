"""Scheduling: requests, blocks and steps in plain Python. Imports no torch and sees no text."""
