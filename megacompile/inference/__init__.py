"""Inference with a trained model: `megacompile generate`, `megacompile chat` and `megacompile evaluate`."""
