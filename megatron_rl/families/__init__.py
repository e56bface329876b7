"""What is known of a model family. Pure: no Megatron, no SGLang, no process group.

A family is one file here, named after its ``model_type`` and holding one ``FAMILY``; nothing else lists the families.
``blocks`` and ``experts`` hold what several of them share.
"""
