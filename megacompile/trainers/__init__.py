"""Code that the integrations for the trainers of transformers and TRL share."""
from __future__ import annotations
