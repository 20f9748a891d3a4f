"""The acceptance of shardwise on GPUs: ``accept.sh`` runs it on one card, ``several.sh`` on several; both also run on
CPUs, at a tiny size.
"""
