"""Tasks: a module each, with a function ``label``."""
