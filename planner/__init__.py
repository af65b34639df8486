"""What a run would do under other settings: a profile of a run, and a simulation of it by the classes that decide in a real one."""
