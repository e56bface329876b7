"""HTTP: sessions, addresses, and lists of server URLs."""
