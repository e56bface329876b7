"""Estimates what a layout costs before it runs: memory per rank, seconds of training, decoding and publishing. Pure.

All estimates are functions of a model's config.json, a layout and a GPU. Fitted constants are next to the code
that uses them, with the measurements that they were fitted to; docs/estimates.md compares the estimates with
published figures.
"""
