"""Tasks from the user's own data: a row is a task, a reward function scores the answer."""
