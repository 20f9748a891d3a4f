"""Configs of Accelerate, DeepSpeed and FSDP, answered line by line: what each becomes here, or why nothing."""
