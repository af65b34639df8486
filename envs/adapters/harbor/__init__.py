"""Tasks in Harbor's format, without Harbor: folders whose containers our sandbox stands in for."""
