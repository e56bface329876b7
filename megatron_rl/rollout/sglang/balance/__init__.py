"""Which server a request goes to, and when; and the client that sends it there."""
