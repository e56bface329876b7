"""Load balancing over servers, and the client that sends the requests."""
