"""Inference servers: the engine contract, and one package per kind of server (client, command line, plugin, weight receiver)."""
