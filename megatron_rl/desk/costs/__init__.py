"""What a layout costs before it runs: memory of a rank, seconds of training, decoding and publishing. Pure.

Functions of a model's config.json, a layout and a GPU. Their constants stand in ``constants`` with the measurements that
they were fitted to; docs/estimates.md compares all of it with what others published.
"""
