"""Process supervision for code: labels of lines, and dense rewards at line ends (arXiv 2410.17621)."""
