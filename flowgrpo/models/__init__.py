"""Models: one Flax decoder for the open families, and what reads and writes their checkpoints."""
