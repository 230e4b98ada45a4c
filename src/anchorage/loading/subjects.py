"""Writing the files that are loaded, durably, in both formats."""
