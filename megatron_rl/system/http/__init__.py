"""HTTP: sessions, addresses, and what names servers."""
