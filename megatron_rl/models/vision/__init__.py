"""Vision-language models: images become tokens of the language model's pack."""
