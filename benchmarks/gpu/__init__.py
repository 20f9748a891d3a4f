"""The acceptance of shardwise on GPUs: of one card by ``accept.sh``, of several by ``several.sh``; both also run on
CPUs, at a tiny size.
"""
