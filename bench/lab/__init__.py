"""Storage-only experiments: cached keys and values through any codec in Python, without touching llama.cpp.

The forward pass that makes a cache is full precision and its cache f16. Only the stored copy is changed: saved,
put through a codec, loaded again. What follows is scored teacher-forced against the untouched copy.
"""
