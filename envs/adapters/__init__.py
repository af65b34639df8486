"""Environments of other libraries, one file each. A library is imported when its kind is chosen."""
