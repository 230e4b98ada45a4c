"""The loading lab: what it costs to bring a file's tensors into memory, cold and warm, and how that was proved."""
