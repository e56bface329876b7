"""Processes that own the HTTP sessions to the servers and read the answers."""
