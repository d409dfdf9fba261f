"""Meshwright: automatic parallel planning and execution for PyTorch models."""
