"""The engine `transformers`: continuous batching over transformers models, behind Slipstream's own server."""
