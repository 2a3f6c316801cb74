"""What a user passes to a streamed model, and the batch that it becomes."""
from __future__ import annotations
