"""report.html and comparison.html: a run's folder as pages that open anywhere."""
