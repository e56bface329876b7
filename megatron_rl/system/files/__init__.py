"""Files that are whole or absent, checked, looked into or shared."""
