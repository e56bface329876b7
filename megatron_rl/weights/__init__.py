"""Weight sync: sends the trainer's weights to running SGLang servers; the entry point is ``publish.py``."""
