"""The values that everything else is written in; imports nothing else of ours."""
