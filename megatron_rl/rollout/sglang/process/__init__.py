"""SGLang servers as processes: how they are started, watched, attached to, put to sleep."""
