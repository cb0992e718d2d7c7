"""HTTP servers and clients that tests and benches of the proxy need: a scripted fake vLLM, fast mocks, a load generator."""
