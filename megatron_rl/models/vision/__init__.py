"""Vision-language models: encode images into tokens of the language model's pack."""
