"""Run: a sharded module on torch.distributed process groups."""

if __name__ == "runtime":
    raise ImportError("import meshwright.runtime, not runtime: under its bare name every class would exist twice")
