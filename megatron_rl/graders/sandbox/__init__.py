"""Runs untrusted programs in confined processes. Imports nothing else of this package."""
