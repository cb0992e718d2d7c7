"""The CUDA backend. Importing this loads nothing."""
