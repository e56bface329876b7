"""Self-contained graders: answers in mathematics, and programs in a sandbox. They import nothing else of this package.
"""
