"""loading.csv -> the figure of time and memory by method, cold and warm."""
