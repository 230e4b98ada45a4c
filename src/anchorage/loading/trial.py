"""One measurement, inside a fresh process."""
