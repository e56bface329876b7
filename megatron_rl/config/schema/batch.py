"""How much one step generates and trains."""

from dataclasses import dataclass

from megatron_rl.config.schema.bounds import at_least


@dataclass
class BatchConfig:
    """How much one step generates and trains: prompts, samples and tokens, over all ranks."""

    num_prompts_per_step: int = at_least(1, default=512)
    """Prompts whose responses are generated at the same time; times num_samples_per_prompt: the slots of a step."""
    num_samples_per_prompt: int = at_least(1, default=16)
    """Responses per prompt; advantages that compare responses need at least 2."""
    max_prompt_tokens: int = at_least(1, default=2048)
    """Longest prompt; longer ones are left out and counted."""
    max_response_tokens: int = at_least(1, default=24576)
    """Budget of a response over all its windows (L_max)."""
    window_tokens: int = at_least(0, default=0)
    """New tokens a response may grow by in one step (W); 0 means max_response_tokens."""
    policy_minibatch_size: int = at_least(1, default=512)
    """Responses in one policy optimizer step, over all ranks."""
    critic_minibatch_size: int = at_least(1, default=512)
    """Finished responses in one critic optimizer step, over all ranks."""
    max_tokens_per_microbatch: int = at_least(1, default=32768)
    """Tokens packed into one forward pass of one rank; a longer single sequence gets a micro-batch of its own."""
