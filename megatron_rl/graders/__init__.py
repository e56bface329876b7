"""Self-contained graders: answers in mathematics, and programs in a sandbox by tests that an analysis reads. They import nothing else.
"""
