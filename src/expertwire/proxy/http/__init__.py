"""The sockets of the proxy: what clients say, what servers say, and the deadlines of both."""
