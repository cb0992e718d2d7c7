"""Expert parallelism on CPU tensors."""
