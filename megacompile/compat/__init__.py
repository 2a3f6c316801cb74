"""Every private part of PyTorch that megacompile uses, with what it is used for. No other file names one.

tests/lint/test_compat.py holds both sentences, and checks each part against the installed torch. Modules here import no
more than their names say, so that what is heavy stays lazy. Private ATen ops (`torch.ops.aten._to_copy`) are named where graphs
are read, since graphs contain them; the test checks those too.
"""
