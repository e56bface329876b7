"""A run and its stored responses on the terminal, read from its folder."""
