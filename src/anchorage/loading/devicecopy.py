"""Copies to a GPU, with and without a copy on the CPU first."""
