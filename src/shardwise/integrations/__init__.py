"""Trainers, accelerators and configs of other libraries, in front of shardwise; each needs the library of its name."""
