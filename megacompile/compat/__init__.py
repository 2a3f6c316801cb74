"""Every private part of PyTorch and of Hugging Face's libraries that megacompile uses, with what it is used for.

No other file names one of PyTorch's. Those of Hugging Face are a table: most of them are methods that we override, and names
that we replace where we need that. tests/lint/test_compat.py holds these sentences, and checks each part against the installed
libraries. Modules here import no more than their names say, so that what is heavy stays lazy. Private ATen ops
(`torch.ops.aten._to_copy`) are named where graphs are read, since graphs contain them; the test checks those too.
"""
