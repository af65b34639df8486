"""Small pieces that every room uses: tasks and threads, files, processes, tracked waits, garbage collection. They import no
room."""
