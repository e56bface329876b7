"""How much one step generates and trains."""

from dataclasses import dataclass


@dataclass
class BatchConfig:
    num_prompts_per_step: int = 512
    num_samples_per_prompt: int = 16
    max_prompt_tokens: int = 2048
    max_response_tokens: int = 24576
    """Budget of a response over all its windows (L_max)."""
    window_tokens: int = 0
    """New tokens a response may grow by in one step (W); 0 means max_response_tokens."""
    policy_minibatch_size: int = 512
    """Responses in one policy optimizer step, over all ranks."""
    critic_minibatch_size: int = 512
    """Finished responses in one critic optimizer step, over all ranks."""
    max_tokens_per_microbatch: int = 32768
    """Tokens packed into one forward pass of one rank; a longer single sequence gets a micro-batch of its own."""
