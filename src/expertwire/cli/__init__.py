"""The `expertwire` command. Every part of it is imported only when it is asked for."""
