"""Scheduling: requests, blocks and steps in plain Python. Does not import torch or handle text."""
