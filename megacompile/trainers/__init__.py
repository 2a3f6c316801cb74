"""What the trainers of Transformers and TRL share."""
from __future__ import annotations
