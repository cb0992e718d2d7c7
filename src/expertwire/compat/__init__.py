"""Names that existing callers import, made of this package's own."""
