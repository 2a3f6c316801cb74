"""What a trained model says: `megacompile generate`, `megacompile chat` and `megacompile evaluate`."""
