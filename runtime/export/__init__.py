"""Modules that leave the process they were made in: written as readable JSON and safetensors, read back without running any of it."""
