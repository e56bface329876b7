"""Weight sync: from the trainer's ranks into running SGLang servers; ``publish.py`` is the way in."""
