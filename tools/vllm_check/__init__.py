"""Real vLLM on CPU behind our proxy, with KV moved by NIXL or by our transfer engine: what scripts/vllm_check runs."""
