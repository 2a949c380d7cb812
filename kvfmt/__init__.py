"""KV-cache quantization formats: defined once, generated into llama.cpp, measured on real models."""

__version__ = "0.1.0"
