"""Describes the supported model families. Pure: no Megatron, no SGLang, no process group.

A family is one file of this package, named after its ``model_type``, with one ``FAMILY``; nothing else lists the
families. ``layer_rules`` contains the rules that several families share.
"""
