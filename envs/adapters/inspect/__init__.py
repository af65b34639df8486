"""Tasks of Inspect (https://inspect.aisi.org.uk): `env.py` is the environment, `player.py` the program that runs the library."""
