"""Ops in C++ for CPU, built once with the C++ compiler that Inductor needs anyway."""
