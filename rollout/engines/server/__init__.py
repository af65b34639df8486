"""A small inference server around a transformers model, for what upstream serves over no wire."""
