"""Several processes that hold the same tensors: private copies against shared maps."""
