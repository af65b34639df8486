"""Launchers start role processes: child processes of this host (`local`), or Ray actors (`ray`)."""
