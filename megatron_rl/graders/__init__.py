"""Graders that stand on their own: answers in mathematics, programs in a sandbox. Import nothing else of this package."""
