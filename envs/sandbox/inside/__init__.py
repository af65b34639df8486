"""Programs that run inside a sandbox. They need nothing but Python's standard library, of any version since 3.8, and import
little of it: they start for every sandbox. The host passes their text."""
