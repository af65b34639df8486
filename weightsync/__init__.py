"""How the new policy travels back to the engines."""
