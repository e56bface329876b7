"""What is known of a model family. Pure: no Megatron, no SGLang, no process group."""
