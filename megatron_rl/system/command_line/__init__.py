"""What commands read from the command line and say on the terminal."""
