"""Prefill, then decode: OpenAI's HTTP API in front, vLLM's `kv_transfer_params` contract behind. Needs no torch and no native core."""
