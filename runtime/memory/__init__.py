"""Host tiles and the store that holds them; device slots, pinned slabs, activation checkpoints."""
