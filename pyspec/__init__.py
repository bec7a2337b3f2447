"""Speculative decoding of GGUF models on the CPU."""
