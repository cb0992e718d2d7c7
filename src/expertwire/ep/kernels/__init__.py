"""Kernels in Triton, one operation a file. Importing this loads nothing; importing a kernel loads triton, an optional extra."""
