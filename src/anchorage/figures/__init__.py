"""Figures, one module each, drawn from the tables alone."""
