"""Writes report.html and comparison.html: self-contained pages about the folders of runs."""
