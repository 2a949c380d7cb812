"""Bytes in, bytes out: files and buffers of other programs, read and written exactly."""
