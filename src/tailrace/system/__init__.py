"""Operating system services: files, locks, child processes, waiting, failpoints."""
