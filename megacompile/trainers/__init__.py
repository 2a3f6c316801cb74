"""Code that the integrations for the trainers of transformers and TRL share. What they override or replace, although
transformers and TRL do not promise to keep it, is in `megacompile.compat.hugging_face`.
"""
from __future__ import annotations
