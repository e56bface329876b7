"""Signals, files, processes, HTTP and GPUs of the machine."""
