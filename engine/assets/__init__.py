"""The built-in model, as the hub lays a checkpoint out. MODEL_CARD.md says what it is."""
