"""loading.md: which method for which use, and which claims hold here, from the tables alone."""
