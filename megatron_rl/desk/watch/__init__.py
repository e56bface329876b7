"""Shows a run and its stored responses on the terminal, read from the run's folder."""
