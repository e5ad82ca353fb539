"""Changes as lines on standard output, for a first look. A task makes the lines, and the driver prints them."""
