"""Choosing placements: candidates, networks of placements, the integer program, strategies and extraction."""
