"""All that knows SGLang."""
